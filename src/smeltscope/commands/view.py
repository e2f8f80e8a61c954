"""`probe view`: the pages of some runs, served to a browser on this machine."""

import os
import secrets
import socket
import sys
import webbrowser
from pathlib import Path

import click

from smeltscope.commands import terminal


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument(
    "run_files", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8050,
    show_default=True,
    metavar="N",
    help="Where to listen; 0 takes a free one.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Listen on this address; of other machines the link's token is asked.",
)
@click.option("--open", "open_it", is_flag=True, help="Open the page in the browser.")  # fmt: skip
def view(run_files: tuple[Path, ...], port: int, host: str, open_it: bool) -> None:
    """Look at RUN files, finished or still being written, in a browser: figures, numbers, prompts.

    Serves until Ctrl+C. Nothing leaves this machine.
    """
    os.environ["DASH_DISABLE_VERSION_CHECK"] = "true"
    from smeltscope.commands.pages import checkpoint_of_run, run_files_of
    from smeltscope.dashboards.server import bind, guard, is_local, make_quiet_server

    runs = run_files_of(run_files)
    listening = bind(host, port)  # before anything slow: a port that is taken is said at once
    from smeltscope.dashboards.app import make_app

    app = make_app(runs, lambda i: checkpoint_of_run(runs[i]))
    port = listening.getsockname()[1]
    token = None if is_local(host) else secrets.token_urlsafe(24)
    guard(app.server, port=port, token=token)
    shown = (
        socket.gethostname() if host in ("0.0.0.0", "::") else host
    )  # every address of this machine
    shown = f"[{shown}]" if ":" in shown else shown
    address = f"http://{shown}:{port}/" + ("" if token is None else f"?token={token}")
    log = terminal.make_log(quiet=False)
    server = make_quiet_server(app.server, listening)
    click.echo(address)
    log.print("Ctrl+C ends.")
    if open_it:
        webbrowser.open(address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    log.file.flush()
    sys.stdout.flush()
    # Threads may be in the middle of a page, in HDF5 or PyTorch, where an orderly end waits for a lock that none of
    # them gives back, or crashes. They only read: nothing is lost by leaving at once.
    os._exit(0)
