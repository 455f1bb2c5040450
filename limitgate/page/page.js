"use strict";
const facts = JSON.parse(document.getElementById("facts").textContent);
const $ = id => document.getElementById(id);
const base = location.pathname.replace(/\/*$/, "/");  // with and without a trailing slash, under any prefix
const SVG = "http://www.w3.org/2000/svg";

// Text becomes text nodes only, so a name can't contain markup.
function put(parent, name, attributes = {}, text) {
  const made = name === "svg" || parent.namespaceURI === SVG ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}
function say(id, text) { if ($(id).textContent !== text) $(id).textContent = text; }

const whole = number => Math.round(number).toLocaleString("en");
const rate = number => number >= 100 ? whole(number) : number.toLocaleString("en", {maximumFractionDigits: 1});
const many = (count, one, more = `${one}s`) => `${whole(count)} ${count === 1 ? one : more}`;
// UTC, as in logs and commands; with the date if it is more than a day before the figures.
function moment(at) {
  const date = new Date(at * 1000);
  if (isNaN(date)) return "?";
  return shown.at - at < 86400 ? date.toISOString().slice(11, 19) : date.toISOString().slice(0, 16).replace("T", " ");
}
const clock = at => `${moment(at)} UTC`;
function lasting(seconds) {
  if (seconds === null || seconds === undefined) return "permanent";
  if (seconds < 60) return `${Math.ceil(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

// A table whose rows stay the same elements, so that focus and scroll positions stay, too.
class Table {
  constructor(id, caption, columns) {
    Object.assign(this, {columns, rows: new Map(), holder: $(id)});
    this.none = put(this.holder, "p", {class: "quiet"});
    this.table = put(this.holder, "table", {hidden: ""});
    put(this.table, "caption", {}, caption);
    const head = put(put(this.table, "thead"), "tr");
    for (const column of columns) put(head, "th", {scope: "col", class: column.kind}, column.title);
    this.body = put(this.table, "tbody");
  }
  show(items, key, none) {
    this.none.textContent = none;
    this.none.hidden = items.length > 0;
    this.table.hidden = !items.length;
    const left = new Map(this.rows);
    items.forEach((item, place) => {
      const name = key(item);
      let row = this.rows.get(name);
      if (!row) {
        row = {element: document.createElement("tr")};
        row.cells = this.columns.map((column, at) => put(row.element, at ? "td" : "th", {class: column.kind, scope: at ? undefined : "row"}));
        this.rows.set(name, row);
      }
      left.delete(name);
      row.item = item;
      this.columns.forEach((column, at) => column.fill ? column.fill(row.cells[at], item, row) : fillText(row.cells[at], column.text(item)));
      if (this.body.children[place] !== row.element) this.body.insertBefore(row.element, this.body.children[place] || null);
    });
    for (const [name, row] of left) { row.element.remove(); this.rows.delete(name); }
  }
}
function fillText(cell, text) {
  const holder = cell.firstElementChild || put(cell, "bdi");
  if (holder.textContent !== text) holder.textContent = text;
}
function fillBar(cell, rule) {
  const bar = cell.querySelector("svg") || put(cell, "svg", {"aria-hidden": "true"});
  const level = bar.querySelector(".level") || (put(bar, "rect", {class: "back", width: "100%", height: "100%", rx: 2}),
    put(bar, "rect", {height: "100%", rx: 2}));
  level.setAttribute("class", rule.utilization >= 1 ? "level full" : "level");
  level.setAttribute("width", `${Math.min(100, rule.utilization * 100)}%`);
  const text = cell.querySelector("span") || put(cell, "span");
  text.textContent = `${whole(rule.utilization * 100)} %`;
}
function fillButtons(...actions) {
  return (cell, item, row) => {
    if (cell.childElementCount || item.digest === null) return;
    for (const action of actions)
      put(cell, "button", {type: "button", "aria-label": `${VERBS[action]} ${item.who || item.key}`}, VERBS[action])
        .addEventListener("click", () => question(action, row.item));
  };
}

// A line over the last 15 minutes, drawn anew with each reading, and the same as a table.
const HIGH = 112, LEFT = 46, BOTTOM = 18;
function nice(top) {
  const unit = 10 ** Math.floor(Math.log10(Math.max(top, 1)));
  return [1, 2, 5, 10].map(each => each * unit).find(each => each >= Math.max(top, 1));
}
function chart(id, history, part, now) {
  const points = history.map(step => ({at: step.at + step.seconds, value: step[part] / step.seconds}));
  points.push({at: points.length ? points.at(-1).at + 30 : 0, value: now});
  const top = nice(Math.max(...points.map(point => point.value)));
  const svg = document.createElementNS(SVG, "svg"), WIDE = Math.max(200, $(`${id}-chart`).clientWidth);
  svg.setAttribute("viewBox", `0 0 ${WIDE} ${HIGH}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${part} per second over 15 minutes: now ${rate(now)}, at most ${rate(Math.max(...points.map(each => each.value)))}`);
  const x = place => LEFT + (WIDE - LEFT) * place / Math.max(1, points.length - 1);
  const y = value => HIGH - BOTTOM - (HIGH - BOTTOM - 10) * value / top;
  for (const value of [0, top / 2, top]) put(svg, "line", {class: "grid", x1: LEFT, x2: WIDE, y1: y(value), y2: y(value)});
  const path = points.map((point, place) => `${place ? "L" : "M"}${x(place).toFixed(1)} ${y(point.value).toFixed(1)}`).join("");
  put(svg, "path", {class: "area", d: `${path}L${WIDE} ${y(0)}L${LEFT} ${y(0)}Z`});
  put(svg, "path", {class: "line", d: path});
  for (const value of [0, top / 2, top]) put(svg, "text", {x: LEFT - 6, y: y(value) + 4, "text-anchor": "end"}, rate(value));
  for (const [place, text, anchor] of [[0, "15 min ago", "start"], [.5, "7.5 min", "middle"], [1, "now", "end"]])
    put(svg, "text", {x: LEFT + (WIDE - LEFT) * place, y: HIGH - 4, "text-anchor": anchor}, text);
  $(`${id}-chart`).replaceChildren(svg);
  tables[id].show([...history].reverse(), step => step.at, "No figures yet.");
}

const numbers = part => [
  {title: "Until", text: step => moment(step.at + step.seconds)},
  {title: "Per second", kind: "number", text: step => rate(step[part] / step.seconds)},
  {title: "In 30 s", kind: "number", text: step => whole(step[part])},
];
function called({rule, tier, shadow}) {
  const more = [tier === "default" ? "" : tier, shadow ? "shadow" : ""].filter(Boolean).join(", ");
  return more ? `${rule} (${more})` : rule;
}
const VERBS = {ban: "Ban", pardon: "Pardon", reset: "Reset"};
const acts = (...names) => facts.actions ? [{title: "Actions", kind: "buttons", fill: fillButtons(...names)}] : [];
const tables = {
  refused: new Table("refused-table", "Refused requests", numbers("refused")),
  admitted: new Table("admitted-table", "Admitted requests", numbers("admitted")),
  rules: new Table("rules", "Rules by utilization", [
    {title: "Rule", kind: "text", text: rule => called({...rule, rule: rule.name})},
    {title: "Utilization", kind: "bar", fill: fillBar},
    {title: "Refused", kind: "number", text: rule => rule.shadow ? `would: ${whole(rule.would_refuse)}` : whole(rule.refused)},
    {title: "Admitted", kind: "number minor", text: rule => whole(rule.admitted)},
  ]),
  who: new Table("who", "Clients that are refused most", [
    {title: "Client", kind: "who", text: entry => entry.who},
    {title: "Rule", kind: "short", text: called},
    {title: "Refused", kind: "number", text: entry => entry.error ? `${whole(entry.count - entry.error)} to ${whole(entry.count)}` : whole(entry.count)},
    {title: "Per second", kind: "number minor", text: entry => rate(entry.per_second)},
    {title: "Since", kind: "number", text: entry => moment(entry.since)},
    ...acts("ban", "reset"),
  ]),
  processes: new Table("processes", "Processes by revision, those that differ first", [
    {title: "Process", kind: "text", text: each => `${each.host}:${each.pid}`},
    {title: "Rules", fill: (cell, each) => { fillText(cell, `${each.revisions.map(hex).join(", ")}${each.follows ? "" : " differs"}`); cell.className = each.follows ? "code" : "code bad-text"; }},
    {title: "Version", kind: "minor", text: each => each.version},
    {title: "Req/s", kind: "number", text: each => rate(each.requests_per_second)},
    {title: "Ref/s", kind: "number", text: each => rate(each.refused_per_second)},
    {title: "Up", kind: "number minor", text: each => lasting(each.uptime)},
    {title: "Note", kind: "text", text: each => [each.up ? "" : "store down", each.clock_ahead ? `clock off by ${lasting(Math.abs(each.clock_ahead))}` : "",
      each.last_error ? `${each.last_error}${each.last_error_at === null ? "" : ` (${lasting(Math.max(0, shown.at + each.clock_ahead - each.last_error_at))} ago)`}` : ""]
      .filter(Boolean).join("; ")},
  ]),
  bans: new Table("bans", "Bans in force", [
    {title: "Client", kind: "who", text: ban => ban.key},
    {title: "Left", kind: "number", text: ban => lasting(ban.retry_after)},
    {title: "By", kind: "text", text: ban => ban.by || ""},
    {title: "Reason", kind: "text", text: ban => ban.reason || ""},
    ...acts("pardon"),
  ]),
};
const kept = /^(rediss?|unix)/.test(facts.store) ? "Redis" : "The store";
const hex = revision => revision === null ? "unknown" : revision.toString(16).padStart(12, "0").slice(0, 7);

let shown = null, shownAt = 0;
function show(figures, at = Date.now()) {
  shown = figures;
  shownAt = at;
  const {store} = figures, admitted = Math.max(0, figures.requests_per_second - figures.refused_per_second);
  $("store").classList.toggle("bad", !store.up || store.writes === false || figures.processes_down > 0);
  document.querySelector("main").classList.toggle("stale", !store.up);
  say("store", !store.up ? `${kept} does not answer: ${(store.error || "no reason given").replace(/\.$/, "")}. If a process gets no answer, on_error `
      + "applies: open, the default, admits all requests; local counts in each process alone; closed answers 503."
    : store.writes === false ? `${kept} answers but refuses to write, so limits are not kept there: ${store.error}.`
    : `${kept} answers${store.latency === null ? "" : ` in ${rate(store.latency * 1000)} ms`}`
      + (figures.processes_down ? `, but not to ${many(figures.processes_down, "process", "processes")}.` : "."));
  showHeadline(figures);
  $("empty").hidden = !figures.empty;
  say("empty", figures.empty ? `Nothing to show: ${figures.empty}.` : "");
  say("refused-now", store.up ? rate(figures.refused_per_second) : "–");
  say("admitted-now", store.up ? rate(admitted) : "–");
  chart("refused", figures.history, "refused", figures.refused_per_second);
  chart("admitted", figures.history, "admitted", admitted);
  tables.rules.show(figures.rules, rule => `${rule.tier} ${rule.name}`, "No rule has counted a request yet.");
  say("adaptive", (figures.adaptive || []).map(each => `${each.rule}: ${each.in_flight} of ${each.limit} places in use.`).join(" "));
  tables.who.show(figures.most_refused, entry => `${entry.tier} ${entry.rule} ${entry.key}`, "No client was refused in the last 5 minutes.");
  showRevisions(figures);
  tables.processes.show(figures.processes, each => each.id, "No process reports.");
  const failed = figures.last_load_error;
  $("load").classList.toggle("bad-text", Boolean(failed));
  say("load", failed ? `${clock(failed.at)} on ${failed.host}:${failed.pid}: ${failed.error}` : "None.");
  tables.bans.show(figures.bans, ban => `${ban.digest} ${ban.key}`, "No client is banned.");
  age();
}
function showRevisions({processes, processes_in_all: all, processes_behind: behind}) {
  $("revisions").hidden = !all;
  $("revisions").classList.toggle("bad", behind > 0);
  const first = processes[0], others = behind > 1 ? ` and ${many(behind - 1, "other")}` : "";
  say("revisions", !all ? "" : behind ? `${behind} of ${many(all, "process", "processes")} ${behind === 1 ? "has" : "have"} other rules: ${first.host}:${first.pid}${others}.`
    : all === 1 ? "1 process runs." : `All ${whole(all)} processes run the same rules.`);
}
function showHeadline({headline: most, empty, refused_per_second: refused, store: {up}}) {
  const line = $("headline"), is = up ? "is" : "was";
  const words = most
    ? [...(most.shadow ? [`No client ${is} refused. `] : []), ["b", most.who], ` ${most.shadow ? up ? "would be" : "would have been" : is} refused most${up ? " now" : ""}, by `,
      most.shadow ? "the shadow rule " : "rule ", ["b", called({...most, shadow: false})], `, since ${clock(most.since)} (${lasting(Math.floor(shown.at) - Math.floor(most.since))})${most.per_second ? `, ${rate(most.per_second)} times a second` : ""}.`]
    : [empty || !up ? "" : refused > 0 ? "Requests are refused, and no client stands out." : "No client is refused."];
  const key = JSON.stringify(words);
  if (line.dataset.key === key) return;
  line.dataset.key = key;
  line.replaceChildren();
  for (const word of words) if (Array.isArray(word)) put(put(line, word[0]), "bdi", {}, word[1]); else line.append(word);
}
function age() {
  const seconds = Math.round((Date.now() - shownAt) / 1000);
  say("fresh", !shown ? "Reading…" : seconds > 25 ? `No news for ${lasting(seconds)}: the service does not answer.`
    : shown.store.up ? `As of ${clock(shown.at)}` : shown.processes_in_all ? `Last known at ${clock(shown.at)}` : "");
  $("fresh").classList.toggle("bad-text", Boolean(shown) && (seconds > 25 || !shown.store.up));
}

// Use events while they arrive, otherwise poll. A hidden page does neither.
let source = null, failures = 0, timer = 0;
function stop() { if (source) source.close(); source = null; clearTimeout(timer); }
function start() {
  stop();
  if (document.hidden) return;
  if (!facts.streams || failures > 1) { poll(); return; }
  let heard = false;
  source = new EventSource(`${base}events`);
  source.onmessage = event => { heard = true; failures = 0; clearTimeout(timer); show(JSON.parse(event.data)); };
  source.onerror = () => { if (!heard) { failures++; start(); } heard = false; };
  timer = setTimeout(() => { failures = 2; start(); }, 6000);  // a proxy may buffer events
}
async function poll() {
  const began = Date.now();
  try {
    const response = await fetch(`${base}figures?screen=1`, {cache: "no-store"});
    if (response.ok) show(await response.json());
  } catch { /* the next one may be answered */ }
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(failures > 1 && facts.streams && ++failures > 15 ? () => { failures = 0; start(); } : poll, Math.max(2000, Date.now() - began));
}
document.addEventListener("visibilitychange", () => { failures = 0; start(); });
addEventListener("resize", () => { if (shown) show(shown, shownAt); });
addEventListener("pagehide", stop);
addEventListener("pageshow", event => { if (event.persisted) start(); });
setInterval(age, 1000);
fetch(`${base}figures?screen=1`, {cache: "no-store"}).then(response => response.json()).then(figures => { if (!shown) show(figures); }, () => {}).finally(start);

$("explain").addEventListener("submit", async event => {
  event.preventDefault();
  const what = $("what").value.trim(), holder = $("explained");
  const asked = what.startsWith("/") ? {method: $("method").value, path: what, ip: $("ip").value} : {id: what};
  let found;
  try {
    const response = await fetch(`${base}explain?${new URLSearchParams(asked)}`, {cache: "no-store"});
    found = await response.json();
  } catch { found = {error: "the service does not answer"}; }
  holder.replaceChildren();
  for (const text of found.words || [`Cannot explain: ${found.error}.`]) put(holder, "p", {}, text);
  const list = (title, columns, items, key) => {
    if (!items || !items.length) return;
    put(holder, "div", {class: "scroll", id: key, tabindex: 0, role: "group", "aria-label": title});
    new Table(key, title, columns).show(items.map((item, place) => ({...item, place})), item => item.place, "");
  };
  list("Limits now", [
    {title: "Limit of rule", text: each => each.rule}, {title: "Period", kind: "number", text: each => each.period ? lasting(each.period) : "–"},
    {title: "Left", kind: "number", text: each => `${whole(each.remaining)} of ${whole(each.limit)}`},
    {title: "Full in", kind: "number", text: each => lasting(each.reset_after)}], found.windows, "explained-windows");
  list("Rules and why they apply", [
    {title: "Rule", kind: "text", text: each => each.name}, {title: "Tier", text: each => each.tier || "–"},
    {title: "Applies", text: each => each.applies ? "yes" : "no"}, {title: "Why", kind: "text", text: each => each.why}], found.rules, "explained-rules");
});

// Each change needs a confirmation.
const EFFECTS = {ban: "Every request of this client under this rule is refused during the ban.", pardon: "The client may send requests again.",
  reset: "The client's buckets are full again. A ban remains."};
let pending = null;
function question(action, item) {
  const rule = item.rule || item.key.split(" ")[0], who = item.who || item.key.split(" ").slice(1).join(" ");
  pending = {action, body: {rule, tier: item.tier, key: item.digest || item.key}};
  say("question", `${VERBS[action]} ${who}?`);
  say("effect", `Rule ${rule}. ${EFFECTS[action]}`);
  say("yes", VERBS[action]);
  say("acted", "");
  $("lasts-row").hidden = action !== "ban";
  $("reason").value = "";
  $("dialog").showModal();
}
$("no").addEventListener("click", () => $("dialog").close());
$("act").addEventListener("submit", async event => {
  event.preventDefault();
  const body = {...pending.body, reason: $("reason").value, ...(pending.action === "ban" ? {seconds: $("lasts").value} : {})};
  try {
    const response = await fetch(base + pending.action, {method: "POST", body: JSON.stringify(body), cache: "no-store",
      headers: {"Content-Type": "application/json", "X-LimitGate-Token": facts.token}});
    const found = await response.json();
    say("acted", response.ok ? "Done. Every process follows within a second." : `Not done: ${found.error}.`);
    if (response.ok) setTimeout(() => $("dialog").close(), 1200);
  } catch { say("acted", "Not done: the service does not answer."); }
});
