"use strict";
// What the page can do beyond being read. All text from the document goes in as text.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const finite = (x) => typeof x === "number" && Number.isFinite(x);
  const at = (x, ...path) => path.reduce((y, key) => (y == null ? null : y[key]), x);
  const list = (x) => (Array.isArray(x) ? x : []);
  const make = (tag, css, text) => {
    const element = document.createElement(tag);
    if (css) element.className = css;
    if (text != null) element.textContent = text;
    return element;
  };

  const minus = (text) => text.replace(/^-/, "−");
  const number = (x) => {
    if (!finite(x)) return "–";
    const size = Math.abs(x);
    if (Number.isInteger(x) || size >= 100) return minus(Math.round(x).toLocaleString("en"));
    return minus(size < 1e-3 ? x.toExponential(1) : x.toPrecision(3).replace(/\.$/, ""));
  };
  const signed = (x) => (x > 0 ? "+" : "") + number(x);
  const share = (x) => (finite(x) ? number(100 * x) + "\u00a0%" : "–");

  // --- theme: auto, light, dark; kept only while the page is open
  const theme = $("theme");
  const themes = ["auto", "light", "dark"];
  let chosen = 0;
  theme.hidden = false;
  theme.addEventListener("click", () => {
    chosen = (chosen + 1) % themes.length;
    if (chosen) document.documentElement.dataset.theme = themes[chosen];
    else delete document.documentElement.dataset.theme;
    theme.textContent = "Theme: " + themes[chosen];
  });

  // --- definitions: Escape hides the one shown until the pointer or focus moves on
  const tips = (off) => document.documentElement.classList.toggle("no-tips", off);
  document.addEventListener("keydown", (event) => event.key === "Escape" && tips(true));
  for (const term of document.querySelectorAll(".term")) {
    term.addEventListener("pointerenter", () => tips(false));
    term.addEventListener("focus", () => tips(false));
  }
  const reveal = () => {
    const found = location.hash && $(decodeURIComponent(location.hash.slice(1)));
    const closed = found && found.closest("details:not([open])");
    if (closed) {
      closed.open = true;
      found.scrollIntoView();
    }
  };
  addEventListener("hashchange", reveal);
  reveal();

  // --- sorting: a header becomes a button; what is not known stays last
  const value = (cell) => {
    if (!cell) return null;
    const text = "v" in cell.dataset ? cell.dataset.v : cell.textContent.trim();
    if (text === "" || text === "–") return null;
    return Number.isNaN(Number(text)) ? text : Number(text);
  };
  const order = (a, b) =>
    typeof a === "number" && typeof b === "number"
      ? a - b
      : String(a).localeCompare(String(b), "en", { numeric: true });
  const sort = (table, column, down) => {
    const groups = table.classList.contains("groups");
    const parent = groups ? table : table.tBodies[0];
    const rows = [...(groups ? table.tBodies : parent.rows)];
    const keyed = rows.map((row) => [value((groups ? row.rows[0] : row).cells[column]), row]);
    keyed.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      return down ? order(b, a) : order(a, b);
    });
    for (const [, row] of keyed) parent.append(row);
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      if (head.classList.contains("fixed")) return;
      const button = make("button", "", head.textContent.trim() || "name");
      button.type = "button";
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const before = head.getAttribute("aria-sort");
        const numeric = head.classList.contains("n");
        const down = before ? before === "ascending" : numeric;
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        sort(table, column, down);
      });
    });
  }

  // --- boxes that scroll can be reached by keyboard, and only those
  const boxes = [...document.querySelectorAll(".scroll")];
  const measure = () => {
    for (const box of boxes) {
      const wide = box.scrollWidth > box.clientWidth + 1 || box.scrollHeight > box.clientHeight + 1;
      const caption = box.querySelector("caption, #heat-side");
      if (wide) {
        box.tabIndex = 0;
        box.setAttribute("role", "group");
        box.setAttribute("aria-label", (caption ? caption.textContent : "table") + ", scrolls");
      } else {
        for (const name of ["tabindex", "role", "aria-label"]) box.removeAttribute(name);
      }
      box.style.setProperty("--box", box.clientWidth + "px");
    }
  };
  addEventListener("resize", measure);
  document.addEventListener("toggle", measure, true);

  // --- map of layers and positions
  const heat = $("heat");
  if (heat) {
    const rows = [...heat.tBodies[0].rows].map((row) => [...row.cells].slice(1));
    const layers = [...heat.tBodies[0].rows].map((row) => row.cells[0].textContent);
    const breaks = JSON.parse(heat.dataset.breaks);
    const readout = $("heat-at");
    let side = heat.dataset.side;
    let now = null;
    for (const id of ["heat-at", "heat-keys"]) $(id).hidden = false;
    readout.textContent = "No cell chosen.";
    const positions = () => at(data, "routing", side, "positions") || {};
    const say = (i, j) => {
      const width = positions().width || 1;
      const found = at(positions().cell_disagreement, j, i);
      const count = at(positions().rows, j);
      const where = `Layer ${layers[i]}, positions ${number(j * width)} to ${number((j + 1) * width - 1)}`;
      readout.textContent = finite(found)
        ? `${where}: ${share(found)} of ${number(count)} rows routed differently (${side}).`
        : `${where}: no rows (${side}).`;
    };
    const focus = (i, j) => {
      const cell = at(rows, i, j);
      if (!cell) return;
      if (now) now.removeAttribute("tabindex");
      now = cell;
      cell.tabIndex = 0;
      cell.focus();
      say(i, j);
    };
    const place = (cell) => [cell.parentNode.sectionRowIndex, cell.cellIndex - 1];
    const paint = () => {
      rows.forEach((cells, i) =>
        cells.forEach((cell, j) => {
          const x = at(positions().cell_disagreement, j, i);
          const shade = !finite(x) ? "x" : x <= 0 ? 0 : 1 + breaks.filter((b) => b < x).length;
          cell.className = "h" + shade;
          cell.textContent = finite(x) ? String(Number((100 * x).toPrecision(3))) : "";
        }),
      );
      for (const id of ["heat-box", "heat-legend"]) {
        $(id).classList.toggle("replay", side === "replay");
        $(id).classList.toggle("native", side === "native");
      }
      $("heat-side").textContent = side;
      if (now) say(...place(now));
    };
    if (rows.length && rows[0].length) {
      now = rows[0][0];
      now.tabIndex = 0;
    }
    heat.addEventListener("focusin", (event) => {
      if (event.target.tagName === "TD") say(...place(event.target));
    });
    heat.addEventListener("pointermove", (event) => {
      if (event.target.tagName === "TD") say(...place(event.target));
    });
    heat.addEventListener("click", (event) => {
      if (event.target.tagName === "TD") focus(...place(event.target));
    });
    heat.addEventListener("keydown", (event) => {
      if (event.target.tagName !== "TD") return;
      const [i, j] = place(event.target);
      const end = rows[i].length - 1;
      const whole = event.ctrlKey || event.metaKey;
      const to = {
        ArrowRight: [i, j + 1],
        ArrowLeft: [i, j - 1],
        ArrowDown: [i + 1, j],
        ArrowUp: [i - 1, j],
        Home: [whole ? 0 : i, 0],
        End: [whole ? rows.length - 1 : i, end],
        PageDown: [Math.min(i + 8, rows.length - 1), j],
        PageUp: [Math.max(i - 8, 0), j],
      }[event.key];
      if (!to) return;
      event.preventDefault();
      focus(...to);
    });
    choose($("heat-choice"), (name) => {
      side = name;
      paint();
    });
  }

  function choose(group, then) {
    if (!group) return;
    group.hidden = false;
    const buttons = [...group.querySelectorAll("button")];
    for (const button of buttons) {
      button.addEventListener("click", () => {
        for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
        then(button.dataset.side);
      });
    }
  }

  // --- load of the experts, any layer
  const layer = $("load-layer");
  if (layer) {
    $("load-choice").hidden = false;
    const loads = (key, k) => list(at(data, "routing", "native", key, k)).map((x) => (finite(x) ? x : 0));
    const sum = (x) => x.reduce((a, b) => a + b, 0);
    const height = (v, top) => (100 - (96 * v) / top).toFixed(1);
    const ticks = (top) => {
      const unit = 10 ** Math.floor(Math.log10(top / 5));
      const step = [1, 2, 5, 10].map((m) => m * unit).find((s) => s >= top / 5);
      return Array.from({ length: Math.floor(top / step) + 1 }, (_, i) => i * step);
    };
    layer.addEventListener("change", () => {
      const k = Number(layer.value);
      const both = ["load_a", "load_b"].map((key) => loads(key, k));
      const parts = both.map((x) => x.map((v) => (v * x.length) / (sum(x) || 1)));
      const top = Math.max(...parts.flat(), 1e-9);
      const busiest = parts.map((x) => x.indexOf(Math.max(...x)));
      const apart = sum(parts[0].map((v, i) => Math.abs(v - (parts[1][i] || 0)))) / 2 / (parts[0].length || 1);
      ["ink", "native"].forEach((css, i) => {
        const path = "M0 100" + parts[i].map((v) => `V${height(v, top)}h1`).join("") + "V100";
        document.querySelector("#load path." + css).setAttribute("d", path);
      });
      const n = parts[0].length;
      document.querySelector("#load .even").setAttribute("d", `M0 ${height(1, top)}H${n}`);
      $("load-scale").replaceChildren(
        ...ticks(top / n).map((t) => {
          const label = make("span", "", `${Number((100 * t).toPrecision(6))}\u00a0%`);
          label.style.top = height(t * n, top) + "%";
          return label;
        }),
      );
      $("load-what").textContent =
        `Layer ${layer.selectedOptions[0].textContent}: busiest expert ${busiest[0]} (engine) and ` +
        `${busiest[1]} (trainer), up to ${number(top)} times the mean; ${share(apart)} of the load moved.`;
    });
  }

  // --- tokens of the worst rollouts
  const total = list(at(data, "spec", "moe_layers")).length;
  let underline = "native";
  const marks = { "\n": "⏎", "\r": "␍", "\t": "⇥" };
  const visible = (text) =>
    [...String(text)]
      .map((c) => (c === "\n" ? "⏎\n" : marks[c] || (c < " " ? String.fromCharCode(0x2400 + c.charCodeAt(0)) : c)))
      .join("");
  const depth = (n) => (!finite(n) || n <= 0 ? 0 : n < 3 ? n : n < 5 ? 3 : n < 9 ? 4 : 5);
  const far = (x) => (!finite(x) ? 0 : Math.abs(x) >= Math.LN2 ? 3 : Math.abs(x) >= 0.2 ? 2 : Math.abs(x) >= 0.05 ? 1 : 0);

  const draw = (sheet, rollout) => {
    const e = rollout.excerpt || {};
    const ids = list(e.token_ids);
    const start = e.start || 0;
    const box = make("div", "excerpt" + (e.text ? "" : " ids"));
    const readout = make("p", "readout", "Move through the tokens with the arrow keys.");
    readout.setAttribute("role", "status");
    box.setAttribute("role", "listbox");
    box.setAttribute("aria-label", `Tokens of rollout ${rollout.id}, ${ids.length} from position ${start}`);
    const options = ids.map((id, i) => {
      const text = at(e.text, i);
      // row t of the document's layers is the pass over token t, which predicts token t + 1
      const layers = i ? at(e.layers, i - 1) : null;
      const lr = { native: at(e.logratio_native, i), replay: at(e.logratio_replay, i) };
      const prompt = finite(e.prompt_len) && start + i < e.prompt_len;
      const words = [
        `Position ${number(start + i)}, ${prompt ? "prompt " : ""}token ${id}`,
        text == null ? "" : ` “${visible(text).trim()}”`,
        finite(layers) ? `: ${layers}${total ? " of " + total : ""} layers differ` : ": layers not known",
        finite(lr.native) ? `, log-ratio native ${signed(lr.native)}` : "",
        finite(lr.replay) ? `, replay ${signed(lr.replay)}` : "",
      ].join("");
      const token = make("span", "", text == null ? String(id) : visible(text));
      token.setAttribute("role", "option");
      token.setAttribute("aria-selected", "false");
      token.setAttribute("aria-label", words);
      token.title = words;
      token.tabIndex = i ? -1 : 0;
      if (finite(layers) && layers > 0) token.dataset.n = layers;
      token.dress = () => {
        const steps = far(lr[underline]);
        token.className = `t${depth(layers)}${steps ? " u" + steps : ""}${prompt ? " prompt" : ""}`;
      };
      token.dress();
      if (finite(e.prompt_len) && start + i === e.prompt_len && i) {
        const here = make("span", "here", "response");
        here.setAttribute("aria-hidden", "true");
        box.append(here);
      }
      box.append(token);
      return token;
    });
    const pick = (token) => {
      for (const other of box.querySelectorAll("[aria-selected=true]")) {
        other.setAttribute("aria-selected", "false");
        other.tabIndex = -1;
      }
      token.setAttribute("aria-selected", "true");
      token.tabIndex = 0;
      readout.textContent = token.title;
    };
    if (options.length) box.addEventListener("focusin", (event) => {
      if (event.target.title) {
        options[0].tabIndex = -1;
        pick(event.target);
      }
    });
    box.addEventListener("click", (event) => event.target.title && event.target.focus());
    box.addEventListener("keydown", (event) => {
      const i = options.indexOf(event.target);
      const last = options.length - 1;
      const to = { ArrowRight: i + 1, ArrowDown: i + 1, ArrowLeft: i - 1, ArrowUp: i - 1, Home: 0, End: last }[event.key];
      if (i < 0 || to === undefined) return;
      event.preventDefault();
      if (options[to]) options[to].focus();
    });
    sheet.append(readout, box);
  };
  for (const body of document.querySelectorAll("tbody[data-rollout]")) {
    const [row, panel] = body.rows;
    const button = make("button", "open");
    button.type = "button";
    button.setAttribute("aria-expanded", "false");
    button.setAttribute("aria-controls", panel.id);
    button.append(...row.cells[0].childNodes);
    row.cells[0].append(button);
    $("excerpt-legend").hidden = false;
    button.addEventListener("click", () => {
      const open = panel.hidden;
      panel.hidden = !open;
      button.setAttribute("aria-expanded", String(open));
      if (open && !panel.cells[0].firstChild) {
        const sheet = make("div", "sheet");
        draw(sheet, data.worst.rollouts[Number(body.dataset.rollout)]);
        panel.cells[0].append(sheet);
      }
      measure();
    });
  }
  choose($("underline"), (name) => {
    underline = name;
    for (const token of document.querySelectorAll("[role=option]")) token.dress();
  });
  const counts = $("counts");
  if (counts) counts.addEventListener("change", () => document.documentElement.classList.toggle("counts", counts.checked));

  measure();
})();
