// Values under the pointer, read from the curves themselves; and runs that the legend hides.
"use strict";
(() => {
  const LEFT = 58, WIDTH = 346, TOP = 8, HEIGHT = 186;
  const tip = document.getElementById("tip");
  const cache = new WeakMap();

  function points(path) { // [x, y] in tenths of a unit
    if (!cache.has(path)) {
      const found = [];
      for (const piece of path.getAttribute("d").split("M").slice(1)) {
        const [x, y, ...steps] = piece.match(/-?\d+/g).map(Number);
        let at = [x, y];
        found.push(at);
        for (let i = 0; i + 1 < steps.length; i += 2) found.push(at = [at[0] + steps[i], at[1] + steps[i + 1]]);
      }
      cache.set(path, found);
    }
    return cache.get(path);
  }

  function value(axis, place) {
    const [low, high, log] = axis.split(" ").map(Number);
    return log ? low * Math.pow(high / low, place) : low + (high - low) * place;
  }

  function words(axis, place) { // no more digits than a curve of tenths of a unit has
    const v = value(axis, place), [low, high, log] = axis.split(" ").map(Number);
    if (log) return v.toPrecision(3);
    const digits = Math.ceil(-Math.log10((high - low) / 2000));
    if (Math.abs(v) >= 1e6 || (v !== 0 && Math.abs(v) < 1e-4)) return v.toPrecision(4);
    return v.toLocaleString("en", { maximumFractionDigits: Math.max(0, Math.min(8, digits)) });
  }

  function nearest(list, x) {
    let best = list[0];
    for (const p of list) if (Math.abs(p[0] - x) < Math.abs(best[0] - x)) best = p;
    return best;
  }

  function show(svg, event) {
    const box = svg.getBoundingClientRect(), plot = svg.querySelector(".plot");
    const x = ((event.clientX - box.left) / box.width * 420 - LEFT) * 10;
    const lines = [];
    let at = null;
    for (const path of plot.querySelectorAll("path[data-label]")) {
      if (getComputedStyle(path).display === "none") continue;
      const p = nearest(points(path), x);
      if (Math.abs(p[0] - x) > 300) continue;
      if (at === null || Math.abs(p[0] - x) < Math.abs(at - x)) at = p[0];
      lines.push([p[1], path]);
    }
    if (!lines.length || x < -60 || x > WIDTH * 10 + 60) return hide(svg);
    const cursor = svg.querySelector(".cursor");
    cursor.setAttribute("transform", `translate(${LEFT + at / 10} 0)`);
    cursor.style.visibility = "visible";
    tip.replaceChildren();
    const head = document.createElement("div");
    head.textContent = `${svg.querySelector(".unit").textContent} ${words(plot.dataset.x, at / 10 / WIDTH)}`;
    tip.append(head);
    for (const [y, path] of lines.sort((a, b) => a[0] - b[0]).slice(0, 12)) {
      const row = document.createElement("div"), chip = document.createElement("i"), text = document.createElement("span");
      chip.className = "chip";
      chip.style.background = getComputedStyle(path).stroke;
      text.textContent = `${words(plot.dataset.y, 1 - y / 10 / HEIGHT)}  ${path.dataset.label}`;
      row.append(chip, text);
      tip.append(row);
    }
    tip.style.visibility = "visible";
    const wide = tip.offsetWidth, right = event.clientX + 16 + wide < window.innerWidth;
    tip.style.left = `${right ? event.clientX + 16 : Math.max(4, event.clientX - 16 - wide)}px`;
    tip.style.top = `${Math.min(event.clientY + 12, window.innerHeight - tip.offsetHeight - 4)}px`;
  }

  function hide(svg) {
    tip.style.visibility = "hidden";
    svg.querySelector(".cursor").style.visibility = "hidden";
  }

  for (const svg of document.querySelectorAll("figure svg[role]")) {
    svg.addEventListener("pointermove", (event) => show(svg, event));
    svg.addEventListener("pointerleave", () => hide(svg));
  }
  for (const button of document.querySelectorAll(".runs button")) {
    button.addEventListener("click", () => {
      const off = button.getAttribute("aria-pressed") === "true";
      button.setAttribute("aria-pressed", String(!off));
      for (const path of document.querySelectorAll(`.plot path.r${button.dataset.run}`)) path.style.display = off ? "none" : "";
    });
  }
})();
