"use strict";
(() => {
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.setAttribute("role", "status");
  tip.hidden = true;
  document.body.append(tip);

  const show = (text, x, y) => {
    tip.textContent = text; // never as HTML: names are not ours
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = x + 14 + box.width > innerWidth ? x - box.width - 14 : x + 14;
    const top = y + 14 + box.height > innerHeight ? y - box.height - 10 : y + 14;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, top)}px`;
  };
  const hide = () => { tip.hidden = true; };
  const share = (x, box) => Math.min(1, Math.max(0, (x - box.left) / box.width));

  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const size = (n) => {
    let k = 0;
    while (n >= 1023.95 && k < units.length - 1) { n /= 1024; k += 1; }
    return `${k ? n.toFixed(1) : n} ${units[k]}`;
  };
  const seconds = (s) => (s < 1e-3 ? `${(s * 1e6).toFixed(0)} µs` : s < 1 ? `${(s * 1e3).toFixed(1)} ms` : `${s.toFixed(3)} s`);

  // Last entry of a sorted list whose first number is not above x.
  const before = (list, x) => {
    let low = 0, high = list.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (list[middle][0] <= x) low = middle; else high = middle - 1;
    }
    return low;
  };

  // -- curves: the nearest point, by pointer or arrow keys
  for (const plot of document.querySelectorAll(".plot[data-points]")) {
    const points = JSON.parse(plot.dataset.points);
    const line = document.createElement("div");
    line.className = "at";
    line.hidden = true;
    plot.append(line);
    let at = points.length - 1;
    const put = (k, x, y) => {
      at = k;
      const box = plot.getBoundingClientRect();
      const [px, py, text] = points[k];
      line.style.left = `${100 * px}%`;
      line.style.setProperty("--y", `${100 * py}%`);
      line.hidden = false;
      show(text, x ?? box.left + px * box.width, y ?? box.top + py * box.height);
    };
    plot.addEventListener("pointermove", (event) => {
      const x = share(event.clientX, plot.getBoundingClientRect());
      let k = before(points, x);
      if (k + 1 < points.length && points[k + 1][0] - x < x - points[k][0]) k += 1;
      put(k, event.clientX, event.clientY);
    });
    plot.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
      if (by === undefined) return;
      put(Math.min(points.length - 1, Math.max(0, at + by)));
      event.preventDefault();
    });
    const off = () => { line.hidden = true; hide(); };
    plot.addEventListener("pointerleave", off);
    plot.addEventListener("blur", off);
  }

  // -- everything else that has something to say
  for (const area of document.querySelectorAll(".plot:not([data-points]), .split")) {
    area.addEventListener("pointermove", (event) => {
      const found = event.target.closest("[data-tip]");
      if (found) show(found.dataset.tip, event.clientX, event.clientY); else hide();
    });
    area.addEventListener("pointerleave", hide);
  }

  // -- timelines
  const round = (rough) => {
    const power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 2.5, 5, 10].map((m) => m * power).find((step) => step >= rough * 0.999);
  };
  for (const timeline of document.querySelectorAll(".timeline")) {
    const whole = Number(timeline.dataset.seconds);
    const held = JSON.parse(timeline.dataset.held);
    const scroll = timeline.querySelector(".scroll");
    const inner = timeline.querySelector(".inner");
    const picture = inner.querySelector("svg");
    const time = picture.querySelector(".time");
    const cross = picture.querySelector(".cross");
    const names = [...picture.querySelectorAll(".named")];
    const first = time.innerHTML; // what the page came with
    let zoom = 1;

    const rule = () => {
      if (zoom === 1) { time.innerHTML = first; return; }
      const wide = scroll.clientWidth * zoom;
      const step = round((whole / wide) * 110);
      const [factor, unit] = whole < 1 ? [1e3, "ms"] : [1, "s"];
      let digits = 0;
      while (digits < 6 && Math.abs(step * factor * 10 ** digits - Math.round(step * factor * 10 ** digits)) > 1e-6) digits += 1;
      const made = [];
      const model = document.createElementNS("http://www.w3.org/2000/svg", "line");
      for (let k = 0; k * step < whole && k < 4000; k += 1) {
        const x = `${(100 * k * step) / whole}%`;
        const line = model.cloneNode();
        for (const [name, value] of Object.entries({ x1: x, x2: x, y1: 19, y2: picture.getAttribute("height"), class: "grid" })) line.setAttribute(name, value);
        const text = document.createElementNS("http://www.w3.org/2000/svg", "text");
        for (const [name, value] of Object.entries({ x, y: 15, class: "tick" })) text.setAttribute(name, value);
        text.textContent = `${(k * step * factor).toFixed(digits)} ${unit}`;
        made.push(line, text);
      }
      time.replaceChildren(...made);
    };
    const label = () => {
      const wide = scroll.clientWidth * zoom;
      for (const bar of names) {
        const text = bar.querySelector("text");
        bar.classList.toggle("small", (parseFloat(bar.getAttribute("width")) / 100) * wide < 8 + 6.4 * text.textContent.length);
      }
    };
    const set = (wanted, around) => {
      const box = scroll.getBoundingClientRect();
      const offset = around === undefined ? box.width / 2 : around - box.left;
      const at = (scroll.scrollLeft + offset) / (box.width * zoom);
      zoom = Math.min(200, Math.max(1, wanted));
      inner.style.width = `${100 * zoom}%`;
      scroll.scrollLeft = at * box.width * zoom - offset;
      timeline.dataset.zoom = zoom;
      rule();
      label();
    };
    timeline.querySelector(".tools").hidden = false;
    for (const button of timeline.querySelectorAll("[data-zoom]:is(button)")) {
      button.addEventListener("click", () => set(zoom * Number(button.dataset.zoom)));
    }
    scroll.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      set(zoom * (event.deltaY < 0 ? 1.25 : 0.8), event.clientX);
    }, { passive: false });
    scroll.addEventListener("keydown", (event) => {
      if (event.key === "+" || event.key === "=") set(zoom * 2);
      else if (event.key === "-") set(zoom / 2);
      else if (event.key === "0") set(1);
    });

    const lanes = [...timeline.querySelectorAll(".labels > div")].slice(held.length ? -held.length : Infinity);
    const told = (x, y) => {
      const k = lanes.findIndex((lane) => {
        const box = lane.getBoundingClientRect();
        return y >= box.top && y <= box.bottom;
      });
      if (k < 0) return `at ${seconds(x * whole)}`;
      const { tier, kinds, states } = held[k];
      const state = states[before(states, x)].slice(1);
      const parts = kinds.map((kind, i) => [kind, state[i]]).filter((part) => part[1]).reverse();
      const total = state.reduce((a, b) => a + b, 0);
      return [`${tier} ${size(total)} at ${seconds(x * whole)}`, ...parts.map(([kind, n]) => `${kind} ${size(n)}`)].join("\n");
    };
    inner.addEventListener("pointermove", (event) => {
      const x = share(event.clientX, inner.getBoundingClientRect());
      cross.setAttribute("x1", `${100 * x}%`);
      cross.setAttribute("x2", `${100 * x}%`);
      cross.style.display = "inline";
      const found = event.target.closest("[data-tip]");
      show(found ? found.dataset.tip : told(x, event.clientY), event.clientX, event.clientY);
    });
    inner.addEventListener("pointerleave", () => { cross.style.display = ""; hide(); });
    new ResizeObserver(() => { if (scroll.clientWidth) { rule(); label(); } }).observe(scroll);
  }

  // -- one recorded step at a time
  for (const group of document.querySelectorAll(".steps")) {
    const parts = [...group.querySelectorAll(":scope > .recorded")];
    if (parts.length < 2) continue;
    const tabs = document.createElement("div");
    tabs.className = "tabs";
    tabs.setAttribute("role", "tablist");
    const buttons = parts.map((part) => {
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("role", "tab");
      button.textContent = part.dataset.title;
      tabs.append(button);
      return button;
    });
    const choose = (k) => {
      parts.forEach((part, i) => { part.hidden = i !== k; });
      buttons.forEach((button, i) => button.setAttribute("aria-selected", i === k));
    };
    buttons.forEach((button, k) => button.addEventListener("click", () => choose(k)));
    group.prepend(tabs);
    choose(parts.length - 1);
  }
  document.documentElement.dataset.ready = "yes";
})();
