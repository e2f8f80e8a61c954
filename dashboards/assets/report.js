/* The page of a report: inflates plotly.js and the figures, draws each when it comes into sight, light or dark.
   With #print in the address all are drawn at once, in light, for paper; with #print-3 in three columns, for a picture. */
(async () => {
  "use strict";
  const root = document.documentElement, print = location.hash.startsWith("#print");
  const button = document.getElementById("scheme");
  const show = scheme => {
    root.dataset.mantineColorScheme = scheme; // by its name the viewer knows it
    button.textContent = scheme === "dark" ? "Light" : "Dark";
  };
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  show(prefersDark.matches && !print ? "dark" : "light");
  root.classList.toggle("print", print);
  root.style.setProperty("--columns", location.hash.split("-")[1] ?? 1);

  const inflated = async id => {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), c => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).text();
  };
  const places = [...document.querySelectorAll("[data-figure]")];
  if (typeof DecompressionStream === "undefined") {
    for (const place of places) place.textContent = "This browser is too old to draw figures.";
    return;
  }
  const script = document.createElement("script");
  script.textContent = await inflated("plotly-js");
  document.head.append(script);
  const { figures, layouts, lighter, config } = JSON.parse(await inflated("figures"));
  if (print) config.displayModeBar = false; // it lies over titles

  // Colours that are too dark on a dark page, exchanged.
  const lightened = (part, name = "") => {
    if (Array.isArray(part)) return part.map(entry => lightened(entry));
    if (part !== null && typeof part === "object") {
      return Object.fromEntries(Object.entries(part).map(([key, value]) => [key, lightened(value, key)]));
    }
    return name.endsWith("color") && Object.hasOwn(lighter, part) ? lighter[part] : part;
  };
  const draw = place => {
    const scheme = place.dataset.drawn = root.dataset.mantineColorScheme, figure = figures[place.dataset.figure];
    const { data, layout } = scheme === "dark" ? lightened(figure) : figure;
    return Plotly.react(place, data, { ...layout, ...layouts[scheme] }, config);
  };
  const inSight = new Set();
  const drawLate = () => {
    for (const place of inSight) if (place.dataset.drawn !== root.dataset.mantineColorScheme) draw(place);
  };
  if (print) {
    await Promise.all(places.map(draw));
    root.dataset.height = document.body.scrollHeight;
    return;
  }
  const watcher = new IntersectionObserver(entries => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) inSight.add(target); else inSight.delete(target);
    }
    drawLate();
  }, { rootMargin: "600px" });
  for (const place of places) watcher.observe(place);
  const change = scheme => { show(scheme); drawLate(); };
  button.addEventListener("click", () => change(root.dataset.mantineColorScheme === "dark" ? "light" : "dark"));
  prefersDark.addEventListener("change", () => change(prefersDark.matches ? "dark" : "light"));
  addEventListener("beforeprint", () => { show("light"); places.forEach(draw); });
})();
