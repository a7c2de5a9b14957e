"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];

  // Theme: the system's choice until the button is used.
  const theme = document.getElementById("theme");
  const isDark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const nameTheme = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
  theme.hidden = false;
  theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; nameTheme(); });
  nameTheme();

  // Charts: a ruler and the values of the nearest step, by pointer or arrow keys.
  for (const chart of all(".chart")) {
    const data = JSON.parse(chart.querySelector("script").textContent);
    const svg = chart.querySelector(".plot > svg"), tip = chart.querySelector(".tip"), hover = chart.querySelector(".hover");
    const ruler = hover.querySelector(".ruler"), width = Number(chart.dataset.width);
    const dots = data.lines.map((line, index) => {
      const group = document.createElementNS(svg.namespaceURI, "g"), dot = document.createElementNS(svg.namespaceURI, "circle");
      group.setAttribute("class", `line-${index + 1}`);
      dot.setAttribute("r", "4");
      group.append(dot);
      hover.append(group);
      return dot;
    });
    let place = data.x.length - 1;
    const show = () => {
      const x = data.x[place];
      hover.removeAttribute("hidden");
      ruler.setAttribute("transform", `translate(${x} 0)`);
      const head = document.createElement("b");
      head.textContent = `step ${data.steps[place].toLocaleString("en")}`;
      tip.replaceChildren(head);
      data.lines.forEach((line, index) => {
        const y = line.y[place], text = line.text[place];
        dots[index].style.display = y === null ? "none" : "";
        if (y !== null) { dots[index].setAttribute("cx", x); dots[index].setAttribute("cy", y); }
        if (text === null) return;
        const row = document.createElement("div");
        row.textContent = `${line.label} ${text}`;
        tip.append(row);
      });
      tip.hidden = false;
      const at = x / width * svg.clientWidth, room = svg.clientWidth - tip.offsetWidth;
      tip.style.left = `${Math.max(0, at + 12 > room ? at - 12 - tip.offsetWidth : at + 12)}px`;
    };
    const hide = () => { tip.hidden = true; hover.setAttribute("hidden", ""); };
    const follow = (event) => {
      const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * width;
      place = data.x.reduce((best, at, index) => Math.abs(at - x) < Math.abs(data.x[best] - x) ? index : best, 0);
      show();
    };
    svg.addEventListener("pointermove", follow);
    svg.addEventListener("pointerdown", follow);
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      place = Math.min(data.x.length - 1, Math.max(0, place + (tip.hidden ? 0 : move)));
      show();
    });
  }

  // Labels: the first place around the outline that no earlier label holds.
  const settle = (canvas) => {
    const wide = canvas.clientWidth, high = canvas.clientHeight, taken = [];
    if (!wide) return;
    for (const label of all(".label", canvas)) {
      label.classList.add("placed");
      const w = label.offsetWidth, h = label.offsetHeight;
      if (!w) continue;
      const left = label.dataset.left / 100 * wide, top = label.dataset.top / 100 * high, bottom = label.dataset.bottom / 100 * high;
      const rows = label.classList.contains("missed") ? [bottom + 2, top - h - 2, bottom - h - 2, top + 2] : [top - h - 2, bottom + 2, top + 2, bottom - h - 2];
      for (let step = 1; step < 12; step += 1) rows.push(bottom + 2 + step * (h + 1), top - 2 - (step + 1) * (h + 1));
      const x = Math.max(0, Math.min(left, wide - w));
      const free = (y) => y >= 0 && y + h <= high && taken.every((t) => x >= t.x + t.w || x + w <= t.x || y >= t.y + t.h || y + h <= t.y);
      const y = rows.find(free) ?? Math.max(0, Math.min(rows[0], high - h));
      taken.push({ x, y, w, h });
      label.style.left = `${x}px`;
      label.style.top = `${y}px`;
    }
  };
  const canvases = all(".canvas");
  const observer = new ResizeObserver((entries) => entries.forEach((entry) => settle(entry.target)));
  canvases.forEach((canvas) => observer.observe(canvas));

  // Gallery: which scenes, and which layers on them.
  const gallery = document.querySelector(".gallery"), SHOWN = 6;
  if (gallery) {
    const cards = all(".scene", gallery), buttons = all("[data-show]");
    const arrange = (mode) => {
      const key = mode === "worst" ? "worst" : "best";
      cards.sort((a, b) => a.dataset[key] - b.dataset[key]);
      cards.forEach((card, index) => { card.hidden = mode !== "all" && index >= SHOWN; });
      gallery.append(...cards);
      buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.show === mode)));
    };
    buttons.forEach((button) => button.addEventListener("click", () => arrange(button.dataset.show)));
    document.querySelector(".tools").hidden = false;
    arrange(buttons.find((button) => button.getAttribute("aria-pressed") === "true").dataset.show);
    all("[data-layer]").forEach((box) => {
      const apply = () => { gallery.classList.toggle(`hide-${box.dataset.layer}`, !box.checked); canvases.forEach(settle); };
      box.addEventListener("change", apply);
      apply();
    });
  }
  root.dataset.ready = "yes";
})();
