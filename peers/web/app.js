"use strict";
// Shows the documents that /events sends (see peers/board.py). Texts may come from anybody: they
// are set as text, never as markup.

const at = (id) => document.getElementById(id);
const curve = { step: [], loss: [], evaluation: [], rate: [] };
const STATES = { ready: "good", announced: "soon", applying: "soon", joining: "soon", draining: "warn" };
const MOST_POINTS = 4000;
const nothing = "–";

function element(name, text, kind) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function clock(seconds) {
  if (seconds === null || seconds === undefined) return nothing;
  const s = Math.max(0, Math.round(seconds));
  const two = (n) => String(n).padStart(2, "0");
  const days = Math.floor(s / 86400);
  const rest = `${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
  if (days) return `${days} d ${Math.floor(s / 3600) % 24} h`;
  return s >= 3600 ? `${Math.floor(s / 3600)}:${rest}` : rest;
}

function ago(seconds) {
  if (seconds === null) return nothing;
  return seconds < 1 ? "now" : seconds < 100 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`;
}

const fixed = (value, digits) => (value === null ? nothing : value.toFixed(digits));

function show(run) {
  if (run.waiting) return;
  document.title = `${run.step}/${run.steps} · ${run.name}`;
  at("name").textContent = run.name;
  at("run").textContent = run.run;
  at("bar").style.width = `${run.steps ? (100 * run.step) / run.steps : 0}%`;
  at("step").textContent = `${run.step} of ${run.steps}`;
  at("loss").textContent = fixed(run.loss, 4);
  at("rate").textContent = run.samples_per_s ? fixed(run.samples_per_s, 1) : nothing;
  at("elapsed").textContent = clock(run.elapsed_s);
  at("eta").textContent = run.step >= run.steps ? "done" : clock(run.eta_s);
  at("phase").textContent = run.phase;
  at("warnings").replaceChildren(...run.warnings.map((text) => element("li", text)));
  at("stages").replaceChildren(...run.stages.flatMap(rows));
  at("events").replaceChildren(...run.events.slice().reverse().map(event));
  take(run.points, run.reset);
}

function rows(stage) {
  const found = stage.replicas.flatMap((replica, i) => replicaRows(stage, replica, i === 0));
  if (!stage.replicas.length) {
    const row = element("tr");
    const cell = element("td", "nobody serves this stage", "bad");
    cell.colSpan = 8;
    row.append(element("td", stage.stage), cell);
    found.push(row);
  }
  if (stage.lost.length) {
    const row = element("tr");
    const cell = element("td", `${stage.lost.length} lost: ${stage.lost.join(", ")}`, "dim");
    cell.colSpan = 8;
    row.append(element("td", ""), cell);
    found.push(row);
  }
  return found;
}

function replicaRows(stage, replica, first) {
  const row = element("tr");
  row.dataset.peer = replica.peer;
  row.dataset.state = replica.state;
  const name = element("td", replica.name);
  name.title = replica.peer;
  const share = element("td");
  const bar = element("span", undefined, "share");
  const full = element("span");
  full.style.width = `${Math.round(100 * (replica.share || 0))}%`;
  bar.append(full);
  share.append(bar, `${Math.round(100 * (replica.share || 0))} %`);
  row.append(
    element("td", first ? stage.stage : ""),
    name,
    element("td", replica.state, STATES[replica.state] || "bad"),
    element("td", replica.step, "n"),
    share,
    element("td", replica.samples_per_s === null ? nothing : `${fixed(replica.samples_per_s, 1)}/s`, "n"),
    element("td", replica.queue, "n"),
    element("td", ago(replica.last_work_s), "n"),
    element("td", replica.address || nothing, "dim"),
  );
  if (!replica.note) return [row];
  const more = element("tr");
  const note = element("td", replica.note, "note");
  note.colSpan = 8;
  more.append(element("td", ""), note);
  return [row, more];
}

function event(one) {
  const line = element("li");
  const time = element("time", new Date(1000 * one.at).toLocaleTimeString([], { hour12: false }));
  line.append(time, element("span", one.text));
  return line;
}

function take(points, reset) {
  if (reset) for (const name of Object.keys(curve)) curve[name] = [];
  if (!points.length && !reset) return;
  for (const [step, loss, evaluation, rate] of points) {
    curve.step.push(step + 1);
    curve.loss.push(loss);
    curve.evaluation.push(evaluation);
    curve.rate.push(rate);
  }
  if (curve.step.length > MOST_POINTS) {
    // Every second one goes, the newest never.
    const odd = (curve.step.length - 1) % 2;
    for (const name of Object.keys(curve)) curve[name] = curve[name].filter((_, i) => i % 2 === odd);
  }
  draw();
}

function draw() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = {
    gridcolor: colour("--line"), zerolinecolor: colour("--line"), automargin: true, fixedrange: true,
  };
  const layout = {
    margin: { l: 44, r: 10, t: 10, b: 34 }, showlegend: false,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("--dim"), size: 12 }, hovermode: "x unified",
    hoverlabel: { bgcolor: colour("--card"), font: { color: colour("--text") } },
    xaxis: { ...axis, title: { text: "step" } }, yaxis: axis,
  };
  const options = { displayModeBar: false, responsive: true };
  const line = (y, name, color) => ({
    x: curve.step, y, name, mode: curve.step.length > 1 ? "lines" : "markers", line: { color, width: 2 },
    marker: { color, size: 6 },
  });
  const evaluated = {
    ...line(curve.evaluation, "evaluation", colour("--amber")), mode: "markers",
  };
  Plotly.react("loss-chart", [line(curve.loss, "loss", colour("--blue")), evaluated], layout, options);
  const fromZero = { ...layout, yaxis: { ...axis, rangemode: "tozero" } };
  Plotly.react("rate-chart", [line(curve.rate, "samples/s", colour("--green"))], fromZero, options);
}

const source = new EventSource("events");
source.addEventListener("run", (message) => show(JSON.parse(message.data)));
source.onopen = () => { at("cut").hidden = true; };
source.onerror = () => { at("cut").hidden = false; };
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
