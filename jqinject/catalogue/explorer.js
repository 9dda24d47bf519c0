// Fills the page from its data: a list of quantizers, and for each combination of their choices a variant.
// Texts of a variant are places in `data.lines`; a curve is a list "place, output, place, output, ..." of its steps.
"use strict";
(() => {
  const element = (id) => document.getElementById(id);
  const data = JSON.parse(element("data").textContent);
  const chosen = { quantizer: data.quantizers[0], options: [] };

  // -- elements; texts are set as text, never as markup

  function html(tag, attributes = {}, text = "") {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.textContent = text;
    return node;
  }

  function svg(tag, attributes, text = "") {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.textContent = text;
    return node;
  }

  // -- which variant: variants come in the order of a counter whose last digit is the last choice

  const own = (quantizer) => quantizer.choices.map((choice) => choice.own);

  function variantOf(quantizer, options) {
    const place = quantizer.choices.reduce((sum, choice, at) => sum * choice.options.length + options[at], 0);
    return quantizer.variants[place];
  }

  const textOf = (places) => places.map((place) => data.lines[place]).join("\n");

  // -- the address keeps the choices: #Int8WeightPerChannelFloat?bit_width=4

  function address() {
    const { quantizer, options } = chosen;
    const names = new URLSearchParams();
    quantizer.choices.forEach((choice, at) => {
      if (options[at] !== choice.own) names.set(choice.name, choice.options[options[at]]);
    });
    const query = names.toString();
    return `#${quantizer.name}${query && "?"}${query}`;
  }

  function follow(hash) {
    const [name, query = ""] = decodeURIComponent(hash.slice(1)).split("?");
    const names = new URLSearchParams(query);
    chosen.quantizer = data.quantizers.find((quantizer) => quantizer.name === name) ?? data.quantizers[0];
    chosen.options = chosen.quantizer.choices.map((choice) => {
      const at = choice.options.indexOf(names.get(choice.name));
      return at < 0 ? choice.own : at;
    });
  }

  function remember() {
    try {
      history.replaceState(null, "", address());
    } catch {
      // A page inside another page may have no address of its own.
    }
  }

  // -- controls

  function listQuantizers() {
    const groups = { weight: html("optgroup", { label: "weights" }), act: html("optgroup", { label: "activations" }) };
    data.quantizers.forEach((quantizer, at) => {
      groups[quantizer.kind].append(html("option", { value: at }, quantizer.name));
    });
    element("quantizer").append(...Object.values(groups).filter((group) => group.children.length));
  }

  function control(choice, at) {
    const row = html("p", { class: "control" });
    const select = html("select", { id: `choice-${choice.name}`, "aria-describedby": `meaning-${choice.name}` });
    choice.options.forEach((label, place) => {
      select.append(html("option", { value: place }, place === choice.own ? `${label} (declared)` : label));
    });
    for (const [label, reason] of choice.refused) {
      select.append(html("option", { disabled: "", title: reason }, `${label}: refused`));
    }
    select.value = chosen.options[at];
    select.addEventListener("change", () => {
      chosen.options[at] = Number(select.value);
      show();
    });
    const why = choice.refused.map(([label, reason]) => ` ${label} is refused: ${reason}`).join("");
    row.append(
      html("label", { for: select.id }, choice.name),
      select,
      html("span", { id: `meaning-${choice.name}`, class: "dim" }, choice.meaning + (why && ";") + why),
    );
    return row;
  }

  function controls() {
    element("quantizer").value = data.quantizers.indexOf(chosen.quantizer);
    element("about").textContent = chosen.quantizer.about;
    element("choices").replaceChildren(...chosen.quantizer.choices.map(control));
    element("curve-note").textContent =
      chosen.quantizer.kind === "weight"
        ? "Of a weight whose inputs rise evenly from −4 to 4: groups of inputs each have their part of it."
        : "Of a row of features from −4 to 4, in evaluation mode; static ranges were collected from −3.2 to 3.2.";
  }

  // -- the curve

  const SIZE = 320, EDGE = 26, REACH = data.extent * 1.1;
  const across = (x) => EDGE + ((x + REACH) / (2 * REACH)) * (SIZE - 2 * EDGE);
  const up = (y) => SIZE - across(Math.max(-2 * REACH, Math.min(2 * REACH, y)));
  const inputAt = (place) => -data.extent + (2 * data.extent * place) / (data.points - 1);

  function path(steps) {
    let line = "";
    for (let at = 0; at < steps.length; at += 2) {
      if (steps[at + 1] === null) continue; // not finite: the step before goes on
      const x = across(inputAt(steps[at])).toFixed(1), y = up(steps[at + 1]).toFixed(1);
      line += line ? `H${x}V${y}` : `M${x} ${y}`;
    }
    return line && `${line}H${across(data.extent).toFixed(1)}`;
  }

  function outputAt(steps, place) {
    let at = 0;
    while (at + 2 < steps.length && steps[at + 2] <= place) at += 2;
    return steps[at + 1];
  }

  function draw(variant, declared) {
    const low = -data.extent, high = data.extent;
    element("curve").setAttribute("viewBox", `0 0 ${SIZE} ${SIZE}`);
    const parts = [svg("line", { class: "axis", x1: across(low), y1: up(low), x2: across(high), y2: up(high) })];
    for (const mark of [low, low / 2, 0, high / 2, high]) {
      parts.push(
        svg("line", { class: "axis", x1: across(mark), x2: across(mark), y1: EDGE, y2: SIZE - EDGE }),
        svg("line", { class: "axis", x1: EDGE, x2: SIZE - EDGE, y1: up(mark), y2: up(mark) }),
        svg("text", { x: across(mark), y: SIZE - 10, "text-anchor": "middle" }, mark),
        svg("text", { x: EDGE - 6, y: up(mark) + 4, "text-anchor": "end" }, mark),
      );
    }
    if (declared !== variant && declared.curve) parts.push(svg("path", { class: "declared", d: path(declared.curve) }));
    if (variant.curve) {
      parts.push(svg("path", { class: "line", d: path(variant.curve) }), svg("circle", { id: "mark", r: 3.5 }));
    }
    element("curve").replaceChildren(...parts);
    read(variant);
  }

  function read(variant) {
    const place = Number(element("input").value), x = inputAt(place);
    element("reading").textContent = variant.curve ? `${x.toFixed(3)} → ${outputAt(variant.curve, place) ?? "not finite"}` : "";
    if (!variant.curve) return;
    element("mark").setAttribute("cx", across(x));
    element("mark").setAttribute("cy", up(outputAt(variant.curve, place)));
  }

  // -- numbers and texts

  function errorRows(variant, declared) {
    return data.dataSets.map((name, at) => {
      const row = html("tr");
      row.append(html("th", { scope: "row" }, name));
      for (const text of [variant.errors?.[at][0], declared.errors?.[at][0], variant.errors?.[at][1]]) {
        row.append(html("td", { class: "right" }, text ?? "–"));
      }
      return row;
    });
  }

  function wiringLines(variant) {
    return (variant.wiring ?? []).flatMap((place) => {
      const [, head, decided = ""] = data.lines[place].match(/^(.*?)(  <- .*)?$/);
      const mine = decided.trim() === `<- ${chosen.quantizer.title}`;
      return [html("span", mine ? { class: "mine" } : {}, head), html("span", { class: "decided" }, `${decided}\n`)];
    });
  }

  function show() {
    const { quantizer, options } = chosen;
    const variant = variantOf(quantizer, options), declared = variantOf(quantizer, own(quantizer));
    const fault = element("fault");
    fault.hidden = !variant.fault;
    fault.textContent = variant.fault ? `These choices do not go together. ${variant.fault}` : "";
    element("facts").textContent = variant.facts ?? "";
    element("errors").replaceChildren(...errorRows(variant, declared));
    element("code").textContent = textOf(variant.code) + "\n";
    element("copied").textContent = "";
    element("wiring").replaceChildren(...wiringLines(variant));
    draw(variant, declared);
    remember();
  }

  // -- copying: where a page may not, the text is selected instead

  async function copy() {
    try {
      await navigator.clipboard.writeText(element("code").textContent);
      element("copied").textContent = "copied";
    } catch {
      getSelection().selectAllChildren(element("code"));
      element("copied").textContent = "selected: copy it with the keyboard";
    }
  }

  // -- begin

  function begin() {
    follow(location.hash);
    controls();
    show();
  }

  listQuantizers();
  element("input").max = data.points - 1;
  element("input").value = Math.round(data.points * 0.6);
  element("input").addEventListener("input", () => read(variantOf(chosen.quantizer, chosen.options)));
  element("quantizer").addEventListener("change", () => {
    chosen.quantizer = data.quantizers[Number(element("quantizer").value)];
    chosen.options = own(chosen.quantizer);
    controls();
    show();
  });
  element("reset").addEventListener("click", () => {
    chosen.options = own(chosen.quantizer);
    controls();
    show();
  });
  element("copy").addEventListener("click", copy);
  element("controls").addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", begin);
  begin();
})();
