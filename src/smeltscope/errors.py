"""The one error class that users see."""


class SmeltscopeError(Exception):
    """A named error: a sentence that says what is wrong, where, and how to mend it.

    The command line prints the sentence and exits with code 2.
    """
