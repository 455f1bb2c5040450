"use strict";
const facts = JSON.parse(document.getElementById("facts").textContent);
const $ = id => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const pause = ms => new Promise(done => setTimeout(done, ms));
const UNITS = {1: "second", 60: "minute", 3600: "hour", 86400: "day"};
const count = number => number.toLocaleString("en");

function put(parent, name, attributes = {}, text = "") {
  const made = parent.namespaceURI === SVG || name === "svg" ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  parent.append(made);
  return made;
}

// A command wraps between its words, never inside one.
function command(pre, text) {
  pre.classList.add("wraps");
  pre.replaceChildren();
  text.split(" ").forEach((word, place) => { if (place) pre.append(" "); put(pre, "span", {}, word); });
}

// A request, and what came back.
async function ask(path, options = {}) {
  const began = performance.now();
  const response = await fetch(facts.base + path, {cache: "no-store", ...options});
  const body = await response.text();
  let document = {};
  try { document = JSON.parse(body); } catch { /* not every answer is JSON */ }
  return {status: response.status, text: response.statusText, headers: response.headers, document, ms: performance.now() - began};
}

const HEADERS = ["Retry-After", "X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset", "Content-Type", "Cache-Control"];
const REASONS = {200: "OK", 401: "Unauthorized", 429: "Too Many Requests", 503: "Service Unavailable"};

function show(where, answer) {
  const lines = HEADERS.filter(name => answer.headers.has(name)).map(name => `${name}: ${answer.headers.get(name)}`);
  const detail = answer.document.detail || answer.document.message;
  $(`${where}-response`).textContent =
    [`HTTP/1.1 ${answer.status} ${REASONS[answer.status] || answer.text}`, ...lines, "", detail || ""].join("\n").trimEnd();
}

function showRule(where, name, tier) {
  const found = facts.rules.find(rule => rule.name === name && rule.tier === tier) || facts.rules.find(rule => rule.name === name);
  $(`${where}-rule`).textContent = found ? `# ${found.file}\n${found.text}` : name ? `- name: ${name}` : "No rule limits this.";
}

const refusedBy = answer => (answer.document["violated-policies"] || [])[0];
const retryAfter = answer => {
  const seconds = answer.headers.get("Retry-After");
  return seconds === null ? "" : ` A client that waits ${seconds} s is admitted.`;
};

// Painted one by one, however fast the answers come.
function Cells(id, many) {
  const list = $(id), cells = [];
  const clear = () => {
    list.replaceChildren();
    cells.length = 0;
    for (let each = 0; each < many; each++) cells.push(put(list, "li", {}, "\u00a0"));
  };
  clear();
  return {
    clear,
    paint(place, status) {
      const cell = cells[place];
      cell.textContent = status;
      cell.className = status === 200 ? "passed" : status === 401 ? "wrong" : "refused";
    },
  };
}

// What is left of each limit. Between two looks it refills as the limiter refills it: evenly.
class Buckets {
  constructor(id, rule) { Object.assign(this, {list: $(id), rule, windows: [], at: 0, rows: []}); }
  take(windows) {
    this.windows = windows.filter(each => each.rule === this.rule);
    this.at = performance.now();
    if (this.rows.length !== this.windows.length) {
      this.list.replaceChildren();
      this.rows = this.windows.map(each => {
        const row = put(this.list, "div", {class: "bucket"});
        put(row, "dt", {}, `per ${UNITS[each.period] || `${each.period} s`}`);
        const svg = put(put(row, "dd", {class: "bar"}), "svg", {"aria-hidden": "true"});
        put(svg, "rect", {class: "back", x: .5, y: .5, width: "100%", height: 15, rx: 4});
        return {row, level: put(svg, "rect", {class: "level", x: 0, y: 0, height: 16, rx: 4}), left: put(row, "dd")};
      });
    }
    this.draw();
  }
  draw() {
    const passed = (performance.now() - this.at) / 1000;
    this.windows.forEach((window, place) => {
      const missing = Math.max(0, window.reset_after - passed) / window.full_after;
      const left = Math.floor(window.limit * (1 - missing) + 1e-6), row = this.rows[place];
      row.level.setAttribute("width", `${Math.max(0, 100 * (1 - missing))}%`);
      row.left.textContent = `${count(left)} of ${count(window.limit)}`;
      row.row.classList.toggle("low", left < 1);
    });
  }
}

const api = new Buckets("buckets", "api"), logins = new Buckets("login-buckets", "login");
const key = () => document.querySelector("#key :checked").value;
const keyHeader = () => key() ? {"X-API-Key": key()} : {};
const tier = () => key() ? "vip" : "default";

async function look() {
  try {
    const {document: state} = await ask("demo/state", {headers: keyHeader()});
    api.take(state.windows);
    logins.take(state.windows);
  } catch { /* the service is being restarted */ }
}
(function animate() { api.draw(); logins.draw(); requestAnimationFrame(animate); })();

const sendCells = Cells("send-cells", 8), loginCells = Cells("login-cells", 4);

function describe() {
  const header = key() ? ` -H 'X-API-Key: ${key()}'` : "";
  command($("send-curl"), `curl -s -o /dev/null -w '%{http_code}\\n'${header} '${facts.url}/api/hello?[1-8]'`);
  showRule("send", "api", tier());
}
$("key").addEventListener("change", () => { describe(); sendCells.clear(); $("send-said").textContent = ""; look(); });

// Sends while the button is held off; a failure is said, not lost.
function press(button, said, work) {
  button.addEventListener("click", async () => {
    if (button.getAttribute("aria-disabled") === "true") return;
    button.setAttribute("aria-disabled", "true");
    try { await work(); } catch { $(said).textContent = "The service does not answer."; }
    button.removeAttribute("aria-disabled");
  });
}

press($("send"), "send-said", async () => {
  sendCells.clear();
  $("send-said").textContent = "";
  // All at once, so that a slow machine does not spread them over a second; painted one by one, as they come back.
  const began = performance.now(), answers = [];
  const asking = Array.from({length: 8}, (_, place) => ask(`api/hello?${place + 1}`, {headers: keyHeader()}));
  let took = 0, failure = null;
  asking.forEach(each => each.then(answer => { took = performance.now() - began; answers.push(answer); look(); },
    error => { failure = error; }));
  for (let place = 0; place < 8; place++) {
    while (answers.length <= place) {
      if (failure) throw failure;
      await pause(10);
    }
    sendCells.paint(place, answers[place].status);
    show("send", answers[place]);
    await pause(110);
  }
  const refusals = answers.filter(answer => answer.status !== 200), refusal = refusals[0], refused = refusals.length;
  showRule("send", refusal ? refusedBy(refusal) : answers[7].document.rule, tier());
  $("send-said").textContent = refused
    ? `${8 - refused} admitted, ${refused} refused by rule ${refusedBy(refusal)}.${retryAfter(refusal)}`
    : `All 8 admitted within ${Math.round(took)} ms.`;
});

async function logIn(password, place) {
  const answer = await ask("login", {method: "POST", body: new URLSearchParams({password})});
  loginCells.paint(place, answer.status);
  show("login", answer);
  showRule("login", refusedBy(answer) || "login", "default");
  return answer;
}
const toLogIn = password => `curl -i -d 'password=${password}' ${facts.url}/login`;

let guessing = Promise.resolve();
press($("guess"), "login-said", () => guessing = guess());
async function guess() {
  loginCells.clear();
  let refused = null, wrong = 0;
  for (const [place, password] of ["123456", "password", "qwerty", "letmein"].entries()) {
    const answer = await logIn(password, place);
    if (answer.status === 401) wrong++; else refused = answer;
    look();
    await pause(160);
  }
  command($("login-curl"), toLogIn("123456"));
  $("login-said").textContent = refused
    ? `${wrong} wrong, ${4 - wrong} not even checked: refused by rule ${refusedBy(refused)}.${retryAfter(refused)}` : `${wrong} wrong.`;
}

$("login").addEventListener("submit", async event => {
  event.preventDefault();
  await guessing.catch(() => {});
  loginCells.clear();
  const password = $("password").value;
  command($("login-curl"), toLogIn(encodeURIComponent(password).replaceAll("'", "%27")));
  try {
    const answer = await logIn(password, 0);
    $("login-said").textContent = answer.status === 200 ? "Logged in." : answer.status === 401 ? "Wrong password."
      : `Refused by rule ${refusedBy(answer)}.${retryAfter(answer)}`;
  } catch { $("login-said").textContent = "The service does not answer."; }
  look();
});

// One bar per request of a crowd: how long it took, and whether it was answered.
const CROWD = 60, WIDE = 480, HIGH = 150, LEFT = 44;
function plot(id, answers, top) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDE} ${HIGH + 24}`);
  svg.setAttribute("aria-hidden", "true");
  for (const part of [0, .5, 1]) {
    const y = HIGH - part * (HIGH - 12);
    put(svg, "line", {class: "grid", x1: LEFT, x2: WIDE, y1: y, y2: y});
    put(svg, "text", {x: LEFT - 8, y: y + 4, "text-anchor": "end"}, `${(top * part / 1000).toFixed(1)} s`);
  }
  put(svg, "text", {x: LEFT, y: HIGH + 18}, "first request");
  put(svg, "text", {x: WIDE, y: HIGH + 18, "text-anchor": "end"}, "last request");
  const step = (WIDE - LEFT) / CROWD;
  for (const {number, status, ms} of answers) {
    const high = Math.max(3, Math.min(1, ms / top) * (HIGH - 12));
    put(svg, "rect", {class: status === 200 ? "passed" : "refused", x: LEFT + number * step + 1, width: step - 2, y: HIGH - high, height: high});
  }
  $(id).replaceChildren(svg);
}

async function crowd(guard, answers, draw) {
  const response = await fetch(`${facts.base}demo/crowd?guard=${guard}`, {cache: "no-store"});
  if (!response.ok) { await response.text(); return response.status; }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const {done, value} = await reader.read();
    if (done) return response.status;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    answers.push(...lines.map(line => JSON.parse(line)));
    draw();
  }
}

const sums = {off: [], on: []};
const drawCrowds = () => {
  const top = Math.max(1000, ...Object.values(sums).flat().map(each => each.ms)), rounded = Math.ceil(top / 1000) * 1000;
  plot("plot-off", sums.off, rounded);
  plot("plot-on", sums.on, rounded);
};
press($("crowd"), "said-on", async () => {
  sums.off = []; sums.on = [];
  $("said-off").textContent = $("said-on").textContent = "";
  const statuses = await Promise.all(["off", "on"].map(guard => crowd(guard, sums[guard], drawCrowds)));
  for (const [place, guard] of ["off", "on"].entries()) {
    const done = sums[guard].filter(each => each.status === 200), others = sums[guard].length - done.length;
    const slowest = (Math.max(0, ...done.map(each => each.ms)) / 1000).toFixed(2);
    $(`said-${guard}`).textContent = statuses[place] === 409 ? "Another crowd is under way; try again in a moment."
      : `${done.length} answered, the slowest after ${slowest} s.${others ? ` ${others} told at once to come back later.` : ""}`;
  }
});

describe();
showRule("login", "login", "default");
showRule("crowd", "guard", "default");
command($("login-curl"), toLogIn("123456"));
command($("crowd-curl"), `curl -s -Z --parallel-immediate -o /dev/null -w '%{http_code}\\n' '${facts.url}/work?[1-40]'`);
for (const pre of document.querySelectorAll(".steps pre")) {
  command(pre, pre.textContent);
  for (const [name, value] of [["tabindex", 0], ["role", "group"], ["aria-label", pre.parentElement.querySelector("h3").textContent]])
    pre.setAttribute(name, value);
}
drawCrowds();
look();
setInterval(() => { if (!document.hidden) look(); }, 1000);
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });

// The live page's own figures, in short. A hidden page does not ask.
async function watch() {
  const where = $("live-section").dataset.live;
  let figures = null;
  try {
    const response = await fetch(`${where}figures?screen=1`, {cache: "no-store"});
    if (response.ok) figures = await response.json();
  } catch { /* the service is being restarted */ }
  $("live-section").hidden = !figures;
  if (!figures) return;
  const most = figures.headline, rate = number => number.toLocaleString("en", {maximumFractionDigits: 1});
  const facts = [
    ["Refused per second", rate(figures.refused_per_second), `beside ${rate(figures.requests_per_second - figures.refused_per_second)} admitted`],
    ["Refused most", most ? most.who : "nobody", most ? `by rule ${most.rule}` : "in the last seconds"],
    ["Store", figures.store.up ? "answers" : "does not answer", figures.store.up ? "" : figures.store.error || ""],
  ];
  $("live").replaceChildren();
  for (const [title, value, note] of facts) {
    const group = put($("live"), "div");
    put(group, "dt", {}, title);
    put(put(group, "dd", {}, value), "small", {}, note);
  }
}
watch();
setInterval(() => { if (!document.hidden) watch(); }, 2000);
