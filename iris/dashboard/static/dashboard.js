// The dashboard's page. It reads one stream of events and draws it. Every text of the network is set as text, never as
// markup: names are chosen by programs. The server's policy forbids anything else as well.

const TOKEN = "iris-dashboard-token";
const SILENT_MS = 5000; // the server says something every 2 s
const SAID_MS = 10000; // how long the result of an action is shown
const RETRY_MS = [500, 1000, 2000, 5000];
const POINTS = 180; // of the lines under the figures
const ROWS = 200; // of one table; what is beyond is counted
const HOSTS = 24; // in the drawing
const SPOKES = 12; // clusters around the only host

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

let hello = { read_only: true, may: [], version: "" };
let network = null; // the newest state
let frozen = null; // the state shown while the page is frozen
let history = []; // [in, out, handled, refused, dropped, unwanted] a second
const opened = new Set(); // clusters whose members are shown

// -- texts ------------------------------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

const count = (value) => (value == null ? "" : whole.format(value));

function rate(value) {
  if (value == null) return "";
  if (value === 0) return "0";
  if (value < 0.1) return "<0.1";
  return value < 100 ? value.toFixed(1) : value < 100000 ? whole.format(Math.round(value)) : short.format(value);
}

function ms(value) {
  if (value == null) return "";
  if (value >= 10000) return `${whole.format(Math.round(value / 1000))} s`;
  return `${value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : Math.round(value)} ms`;
}

function bytes(value) {
  if (value == null) return "";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) [value, unit] = [value / 1000, unit + 1];
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

function time(seconds) {
  if (seconds == null) return "";
  const s = Math.floor(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  return s < 172800 ? `${Math.floor(s / 3600)} h ${Math.floor(s / 60) % 60} min` : `${Math.floor(s / 86400)} d`;
}

const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
const sum = (rows, field) => rows.reduce((total, row) => total + (row[field] ?? 0), 0);
const brief = (id) => (id.length > 12 ? `${id.slice(0, 8)}…` : id);
const hidden = (value) => (value ? count(value) : ""); // a zero that is not worth a look

// -- elements ---------------------------------------------------------------------------------------------------

/** Return a new element with attributes and children; a child that is a string becomes text. */
function make(name, attributes = {}, ...children) {
  const element = name in svgNames ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value != null) element.setAttribute(key, value);
  element.append(...children);
  return element;
}
const svgNames = { svg: 1, g: 1, rect: 1, line: 1, circle: 1, text: 1, polyline: 1, title: 1 };

/** Show `parts` in `cell`, if they are not there already: texts, tags {tag, text}, buttons {act, text}, {more} and {pre}. */
function put(cell, parts) {
  const sign = JSON.stringify(parts);
  if (cell.sign === sign) return;
  cell.sign = sign;
  const focused = cell.contains(document.activeElement) && document.activeElement.dataset.act;
  cell.replaceChildren(
    ...parts.map((part) => {
      if (typeof part === "string") return document.createTextNode(part);
      if (part.act) {
        const button = make("button", { type: "button", "data-act": part.act, "aria-label": part.label, class: part.class, "aria-expanded": part.expanded }); // prettier-ignore
        button.textContent = part.text;
        return button;
      }
      if (part.pre != null) return make("pre", {}, part.pre);
      return make("span", { class: part.more ? "more" : `tag ${part.tag}`, title: part.hint }, part.text);
    }),
  );
  if (focused) cell.querySelector(`[data-act="${focused}"]`)?.focus();
}

/** A table whose rows stay the same elements from one state to the next, so that focus and selection stay. */
class Table {
  constructor(id, columns, { key, state = () => "", kind = () => "", act = () => {} }) {
    Object.assign(this, { id, columns, key, state, kind, act });
    this.element = $(`${id}-table`);
    this.empty = $(`${id}-empty`);
    this.sorted = null; // [index of a column, 1 or -1]
    this.rows = new Map(); // key -> its element
    this.held = new Map(); // key -> its row
    this.element.setAttribute("role", "table"); // small screens lay rows out as cards, which hides that
    const head = make("tr", { role: "row" });
    columns.forEach((column, index) => {
      const cell = make("th", { scope: "col", role: "columnheader", class: column.class, title: column.hint });
      if (column.value) {
        const button = make("button", { type: "button" }, column.title);
        button.addEventListener("click", () => this.sortBy(index));
        cell.append(button);
      } else cell.append(column.title);
      head.append(cell);
    });
    this.body = make("tbody", { role: "rowgroup" });
    this.element.append(make("thead", { role: "rowgroup" }, head), this.body);
    this.element.setAttribute("aria-labelledby", `${id}-title`);
    this.body.addEventListener("click", (event) => {
      const button = event.target.closest("[data-act]");
      if (button) this.act(button.dataset.act, this.held.get(button.closest("tr").dataset.key));
    });
  }

  sortBy(index) {
    const [old, way] = this.sorted ?? [];
    const first = this.columns[index].class === "number" ? -1 : 1; // the largest number is asked for first
    this.sorted = old !== index ? [index, first] : way === first ? [index, -first] : null;
    [...this.element.tHead.rows[0].cells].forEach((cell, at) => {
      if (this.sorted?.[0] === at) cell.setAttribute("aria-sort", this.sorted[1] > 0 ? "ascending" : "descending");
      else cell.removeAttribute("aria-sort");
    });
    draw();
  }

  /** Return `rows` as they are sorted and filtered. */
  chosen(rows, words) {
    const found = rows.filter((row) => matches(row, words));
    if (!this.sorted) return found;
    const [index, way] = this.sorted;
    const { value } = this.columns[index];
    return found.sort((a, b) => {
      const [left, right] = [value(a) ?? -Infinity, value(b) ?? -Infinity];
      return way * (typeof left === "string" || typeof right === "string" ? String(left).localeCompare(String(right)) : left - right);
    });
  }

  /** Show these rows, in this order. Rows do not change places while one of them has the focus. */
  show(rows, empty = true) {
    const shown = rows.slice(0, ROWS);
    this.held = new Map();
    for (const row of shown) {
      let key = this.key(row);
      while (this.held.has(key)) key += "'"; // two hosts may have one name
      this.held.set(key, row);
    }
    for (const [key, element] of this.rows) {
      if (!this.held.has(key)) {
        element.remove();
        this.rows.delete(key);
      }
    }
    const still = this.body.contains(document.activeElement);
    let after = null;
    for (const [key, row] of this.held) {
      let element = this.rows.get(key);
      if (!element) {
        element = make("tr", { role: "row", tabindex: "-1", "data-key": key });
        for (const column of this.columns) {
          const first = element.children.length === 0;
          element.append(make(first ? "th" : "td", { scope: first ? "row" : null, role: first ? "rowheader" : "cell", class: column.class, "data-title": first ? null : column.title })); // prettier-ignore
        }
        this.rows.set(key, element);
        (after ?? this.body)[after ? "after" : "prepend"](element);
      } else if (!still && element.previousElementSibling !== after) {
        (after ?? this.body)[after ? "after" : "prepend"](element);
      }
      after = element;
      element.dataset.state = this.state(row);
      element.className = this.kind(row);
      this.columns.forEach((column, index) => {
        const parts = [column.parts(row)].flat().filter((part) => part !== "" && part != null && part !== false);
        put(element.cells[index], parts);
        element.cells[index].classList.toggle("empty-cell", parts.length === 0);
      });
    }
    this.element.parentElement.hidden = shown.length === 0;
    if (this.empty) this.empty.hidden = shown.length > 0 || !empty;
    return rows.length - shown.length;
  }
}

const searched = new WeakMap();

/** Whether each word is somewhere in the texts of a row. */
function matches(row, words) {
  if (!words.length) return true;
  if (!searched.has(row)) searched.set(row, texts(row).join("\n").toLowerCase());
  return words.every((word) => searched.get(row).includes(word));
}
const texts = (value) => (typeof value === "string" ? [value] : value && typeof value === "object" ? Object.values(value).flatMap(texts) : []);

// -- tables -----------------------------------------------------------------------------------------------------

const column = (title, value, parts, more = {}) => ({ title, value, parts, class: "", ...more });
const number = (title, field, text, hint) => column(title, (row) => row[field], (row) => text(row[field]), { class: "number", hint });
const name = (title, value, parts = value, more = {}) => column(title, value, parts, { class: "name", ...more });

const STATES = { up: "good", draining: "warn", silent: "warn", unasked: "", suspended: "bad", away: "bad", unlinked: "bad" };
const stateTag = (state, error = "") => state !== "up" && { tag: STATES[state] ?? "warn", text: state, hint: error || null };
const from = (link) => link.relay_host || brief(link.relay);
const to = (link) => link.peer_host || brief(link.peer) || link.address;
const level = (row) => (STATES[row.state] === "bad" ? "bad" : STATES[row.state] === "warn" ? "warn" : "");

const tables = {
  clusters: new Table(
    "clusters",
    [
      name("Cluster", (row) => row.name ?? row.program, (row) => (row.member ? memberName(row.member) : clusterName(row))),
      column("Members", (row) => row.total, (row) => count(row.total), { class: "number" }),
      number("Calls/s", "handled_rate", rate, "handled in a second"),
      number("p50", "p50_ms", ms, "half of the calls took at most this long"),
      number("p99", "p99_ms", ms, "99 of 100 calls took at most this long"),
      number("Running", "running", hidden),
      number("Queued", "queued", hidden),
      number("Failed/s", "failed_rate", (value) => (value ? rate(value) : "")),
      number("Refused/s", "refused_rate", (value) => (value ? rate(value) : "")),
      column("Remarks", null, (row) => row.remarks.length > 0 && { more: true, text: row.remarks.join("; ") }, { class: "text" }),
    ],
    {
      key: (row) => row.key,
      kind: (row) => (row.member ? "member" : ""),
      state: (row) => (row.slow ? "warn" : row.member ? level(row.member) : ""),
      act: (act, row) => toggle(row),
    },
  ),
  slow: new Table(
    "slow",
    [
      name("Who", (row) => row.name, (row) => [row.name, row.id && { more: true, text: ` ${row.id}` }, { tag: "warn", text: row.kind }]),
      column("Why", null, (row) => row.why.join("; "), { class: "why" }),
      name("Cluster or stream", (row) => row.where),
      name("Host", (row) => row.host),
      number("For", "since_s", time),
    ],
    { key: (row) => `${row.kind} ${row.who} ${row.where} ${row.host}` },
  ),
  drops: new Table(
    "drops",
    [
      name("Cause", (row) => row.cause, (row) => row.cause.replaceAll("_", " ")),
      name("Where", (row) => row.name),
      number("Now/s", "rate", rate),
      number("Total", "total", count),
    ],
    { key: (row) => `${row.where} ${row.host} ${row.cause}`, state: (row) => (row.rate > 0 ? "warn" : "") },
  ),
  relays: new Table(
    "relays",
    [
      name("Relay", (row) => row.host, (row) => [row.host || row.address || brief(row.id), stateTag(row.state, row.error)]),
      column("Id", (row) => row.id, (row) => brief(row.id), { class: "id" }),
      name("Site", (row) => row.site),
      number("In/s", "in_rate", rate),
      number("Out/s", "out_rate", rate),
      number("Unwanted/s", "unwanted_rate", rate, "nobody subscribes to it, or no member receives it; this is not a fault"),
      number("Refused/s", "refused_rate", rate),
      number("Dropped/s", "dropped_rate", rate),
      number("Expired/s", "expired_rate", rate),
      number("Held", "held", hidden),
      column("Queued", (row) => row.queued_bytes, (row) => row.queued_bytes != null && `${bytes(row.queued_bytes)} of ${bytes(row.queue_limit_bytes)}`, { class: "number" }),
      number("Programs", "sessions", hidden),
      number("Up", "uptime_s", time),
    ],
    { key: (row) => row.id || row.address, state: level },
  ),
  links: new Table(
    "links",
    [
      name("Link", (row) => `${from(row)} → ${to(row)}`, (row) => [`${from(row)} → ${to(row)}`, stateTag(row.state, row.error)]),
      column("Address", (row) => row.address, (row) => row.address, { class: "id" }),
      name("Site", (row) => row.site),
      number("Round trip", "rtt_ms", ms),
      number("In/s", "in_rate", rate, "frames in a second"),
      number("Out/s", "out_rate", rate, "frames in a second"),
      number("Bytes in/s", "in_bytes_rate", bytes),
      number("Queued", "queued_bytes", (value) => (value ? bytes(value) : "")),
      number("Held", "held", hidden),
      number("Clock", "clock_offset_ms", (value) => (value == null ? "" : `${value > 0 ? "+" : ""}${ms(value)}`), "the other host's clock minus this one's"),
    ],
    { key: (row) => `${row.relay} ${row.peer || row.address}`, state: level },
  ),
  sites: new Table(
    "sites",
    [
      name("Site", (row) => row.name, (row) => [row.name, row.own ? { tag: "", text: "this site" } : stateTag(row.state)]),
      number("Round trip", "rtt_ms", ms),
      number("Loss", "loss", (value) => (value == null ? "" : `${(value * 100).toFixed(2)} %`), "share of TCP segments that were sent again"),
      number("Cost", "cost_ms", (value) => (value ? `${value} ms` : "")),
      number("Ways", "ways", hidden, "connections of gateways that lead there"),
      number("Clusters", "clusters", hidden),
      number("Topics", "topics", hidden),
    ],
    { key: (row) => row.name, state: level },
  ),
  programs: new Table(
    "programs",
    [
      name("Program", (row) => row.label),
      name("Host", (row) => row.host),
      number("Process", "pid", (value) => (value ? String(value) : "")),
      name("User", (row) => row.user),
      number("Members", "members", hidden),
      number("Subscriptions", "subscriptions", hidden),
      number("Running", "running", hidden, "calls that it works on"),
      number("Waiting", "waiting", hidden, "its calls that wait for an answer"),
      number("Tunnels", "tunnels", hidden),
      number("Held", "held", hidden, "messages queued for it, because it does not read fast enough"),
      number("Lost", "lost_messages", hidden, "messages that it reports to have lost since it connected"),
      number("Failed", "failed", hidden, "calls of its handlers that raised an exception"),
    ],
    { key: (row) => row.key, state: (row) => (row.held_for_s > 0 || row.slow ? "warn" : "") },
  ),
  streams: new Table(
    "streams",
    [
      name("Stream", (row) => row.name, (row) => [row.name, row.paused && { tag: "warn", text: "paused" }, row.failed && { tag: "bad", text: "failed", hint: row.failed }]),
      name("Source", (row) => row.source),
      name("Host", (row) => row.host),
      number("In/s", "in_rate", rate),
      number("Messages", "messages", count),
      number("Size", "size_bytes", bytes),
      number("Lag", "lag", count, "of the consumer that is behind most"),
      number("Dead letters", "dead_letters", hidden),
      number("Lost", "lost_messages", hidden, "messages that the store could not record since it started"),
    ],
    { key: (row) => row.uuid, state: (row) => (row.failed ? "bad" : row.paused || row.dead_letters ? "warn" : "") },
  ),
  consumers: new Table(
    "consumers",
    [
      name("Consumer", (row) => row.name, (row) => [row.name, row.paused && { tag: "warn", text: "paused" }]),
      name("Stream", (row) => row.stream),
      number("Workers", "workers", count),
      number("Lag", "lag", count, "messages that it has not confirmed"),
      number("Lag/s", "lag_rate", (value) => (value == null ? "" : value > 0 ? `+${rate(value)}` : value < 0 ? `−${rate(-value)}` : "0"), "above 0 it falls behind"),
      number("Confirmed/s", "settled_rate", rate),
      number("In flight", "pending", hidden),
      number("Again", "redelivering", hidden, "messages that are delivered again"),
      number("Missed", "missed", hidden, "messages that were deleted before it had them"),
      column("", null, buttonsOf, { class: "wide" }),
    ],
    { key: (row) => row.key, state: (row) => (row.dead || row.paused || (row.workers === 0 && row.lag) ? "warn" : ""), act: ask },
  ),
  account: new Table(
    "account",
    [
      name("Relay", (row) => row.host, (row) => [row.host || brief(row.id) || row.address, stateTag(row.state, row.error)]),
      ...["in", "copied", "out", "unwanted", "refused", "dropped", "expired", "held"].map((word) =>
        column(word[0].toUpperCase() + word.slice(1), (row) => row.account?.[word], (row) => count(row.account?.[word]), { class: "number" }),
      ),
    ],
    { key: (row) => row.id || row.address, state: level },
  ),
};

function clusterName(row) {
  const parts = row.keyed && row.members.length
    ? [{ act: "toggle", class: "open", text: row.name, expanded: String(opened.has(row.name)) }]
    : [row.name];
  if (!row.keyed) parts.push({ tag: "", text: "no key", hint: "The dashboard holds no key of this cluster, so its members do not describe themselves to it." });
  return parts;
}

function memberName(member) {
  const parts = [member.program || brief(member.id), { more: true, text: ` ${member.host}${member.pid ? ` · process ${member.pid}` : ""}` }];
  return [...parts, stateTag(member.state, member.error)];
}

function toggle(row) {
  if (!opened.delete(row.name)) opened.add(row.name);
  draw();
}

/** Return the rows of clusters, each opened one followed by its members. */
function clusterRows(shown, words) {
  const whyOf = new Map(shown.slow.filter((each) => each.kind === "member").map((each) => [`${each.where} ${each.who}`, each.why]));
  const rows = shown.clusters.map((cluster) => {
    const slow = cluster.members.filter((member) => whyOf.has(`${cluster.name} ${member.id}`)).length;
    const remarks = Object.entries(cluster.other_keys).map(([key, held]) => `${held} under another key (${key}…)`);
    for (const [site, held] of Object.entries(cluster.sites)) remarks.push(`${held} in site ${site}`);
    if (slow) remarks.unshift(`${slow} of ${cluster.total} slow`);
    return { ...cluster, key: `cluster ${cluster.name}`, remarks, slow: slow > 0 };
  });
  return tables.clusters.chosen(rows, words).flatMap((cluster) => {
    if (!opened.has(cluster.name)) return [cluster];
    const members = cluster.members.map((member) => {
      const why = whyOf.get(`${cluster.name} ${member.id}`) ?? [];
      return { ...member, member, key: `${cluster.name} ${member.id}`, total: null, remarks: why, slow: why.length > 0 };
    });
    return [cluster, ...tables.clusters.chosen(members, [])];
  });
}

/** Return member id -> its program, by which people know it. */
const programs = (shown) => new Map(shown.clusters.flatMap((cluster) => cluster.members.map((member) => [member.id, member.program])));
const memberId = (id) => id.replace(/^([0-9a-f]{8})[0-9a-f]+/, "$1…");

/** Return rows with a `name` and, for a member, the short id that tells it from others. */
function slowRows(shown) {
  const known = programs(shown);
  return shown.slow.map((each) => (each.kind === "member" ? { ...each, name: known.get(each.who) || "member", id: memberId(each.who) } : { ...each, name: each.who, id: "" }));
}

function dropRows(shown) {
  const known = programs(shown);
  return shown.drops.map((each) => {
    const id = each.where.replace(/^member /, "");
    return { ...each, name: id === each.where ? each.where.replace(/^program /, "") : `${known.get(id) || "member"} ${memberId(id)}` };
  });
}

// -- figures, alerts ------------------------------------------------------------------------------------------------

const FIGURES = [
  { title: "Messages in", unit: "/s", value: () => totals()[0], text: rate, point: 0 },
  { title: "Messages out", unit: "/s", value: () => totals()[1], text: rate, point: 1 },
  { title: "Calls handled", unit: "/s", value: () => totals()[2], text: rate, point: 2 },
  { title: "Slowest p99", value: () => slowest()?.p99_ms ?? null, text: ms, note: () => slowest()?.name ?? "" },
  { title: "Refused", unit: "/s", value: () => totals()[3], text: rate, point: 3 },
  { title: "Dropped", unit: "/s", value: () => totals()[4], text: rate, point: 4, bad: (value) => value > 0 },
  { title: "Unwanted", unit: "/s", value: () => totals()[5], text: rate, point: 5 },
  { title: "Held now", value: () => sum(state().relays, "held"), text: count },
];

const state = () => frozen ?? network;

/** Return messages in and out, calls handled, refused, dropped, and unwanted, a second: as `figures` of the server. */
function totals({ totals: of } = state()) {
  return [of.in_rate, of.out_rate, of.handled_rate, of.refused_rate, of.dropped_rate, of.unwanted_rate];
}

const slowest = () => state().clusters.reduce((most, each) => (each.p99_ms > (most?.p99_ms ?? -1) ? each : most), null);

function drawFigures() {
  const box = $("tiles");
  FIGURES.forEach((figure, index) => {
    let tile = box.children[index];
    if (!tile) {
      tile = make("div", {}, make("dt", {}, figure.title), make("dd"));
      if (figure.point != null) tile.append(make("svg", { viewBox: `0 0 ${POINTS} 20`, preserveAspectRatio: "none", "aria-hidden": "true" }, make("polyline")));
      box.append(tile);
    }
    const value = figure.value();
    const note = value == null ? "" : figure.note?.() || figure.unit || "";
    const dd = tile.querySelector("dd");
    const sign = `${figure.text(value)} ${note}`;
    if (dd.sign !== sign) {
      dd.sign = sign;
      dd.replaceChildren(value == null ? "–" : figure.text(value).replace(" ", "\u00a0"), make("span", { class: "unit" }, note));
    }
    tile.dataset.state = figure.bad?.(value) ? "bad" : "";
    if (figure.point == null) return;
    const points = history.map((each) => each[figure.point] ?? 0);
    const top = Math.max(...points, 1);
    const apart = POINTS / Math.max(points.length, 60); // the last minute at least, so that the line is soon one
    const line = points.map((each, at) => `${(POINTS - (points.length - 1 - at) * apart).toFixed(1)},${(19 - (18 * each) / top).toFixed(1)}`);
    tile.querySelector("polyline").setAttribute("points", line.join(" "));
  });
}

/** Return [level, text] for what needs attention, the worst first. */
function alerts(shown) {
  const bad = [];
  const warn = [];
  for (const relay of shown.relays) {
    const who = `Relay ${relay.host || relay.address || brief(relay.id)}`;
    if (relay.state === "away") bad.push(`${who} is away${relay.error ? `: ${relay.error}` : ""}`);
    if (relay.state === "suspended") bad.push(`${who} was lost a moment ago`);
    if (relay.state === "draining") warn.push(`${who} is stopping`);
  }
  for (const site of shown.sites) if (!site.own && site.state !== "up") bad.push(`Site ${site.name} is ${site.state === "unlinked" ? "not linked" : "suspended"}`);
  for (const link of shown.links) if (link.state === "unlinked") warn.push(`No link from ${from(link)} to ${to(link)}: ${link.error}`);
  for (const stream of shown.streams) {
    if (stream.failed) bad.push(`Stream ${stream.name}: ${stream.failed}`);
    if (stream.dead_letters) warn.push(`Stream ${stream.name} has ${plural(stream.dead_letters, "dead letter")}`);
  }
  const said = new Set(["stream", ...shown.relays.filter((each) => each.state === "away").map((each) => `relay ${each.host}`)]);
  for (const each of slowRows(shown)) {
    if (said.has(each.kind) || said.has(`${each.kind} ${each.who}`)) continue;
    const where = each.where || (each.kind === "link" || each.kind === "program" ? "" : each.host);
    warn.push(`${each.kind} ${each.name}${where ? ` of ${where}` : ""}: ${each.why.join("; ")}`);
  }
  for (const each of dropRows(shown)) if (each.rate > 0 && !each.where.startsWith("program ")) warn.push(`${each.name} drops ${rate(each.rate)} messages a second: ${each.cause.replaceAll("_", " ")}`);
  warn.push(...shown.problems);
  for (const [table, left] of Object.entries(shown.other)) warn.push(`${plural(left, "row")} of ${table} over the limit not shown`);
  const sentence = (text) => text[0].toUpperCase() + text.slice(1);
  return [...bad.map((text) => ["bad", sentence(text)]), ...warn.map((text) => ["warn", sentence(text)])];
}

function drawAlerts(found) {
  const list = $("alerts");
  const shown = found.slice(0, 12);
  if (found.length > shown.length) shown.push(["warn", `and ${found.length - shown.length} more, in the tables below`]);
  while (list.children.length > shown.length) list.lastChild.remove();
  shown.forEach(([grade, text], index) => {
    const item = list.children[index] ?? list.appendChild(make("li"));
    item.dataset.level = grade;
    if (item.textContent !== text) item.textContent = text;
  });
  $("calm").hidden = found.length > 0;
  $("attention-count").textContent = found.length ? String(found.length) : "";
}

// -- the drawing ------------------------------------------------------------------------------------------------------

const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** Return the clusters to draw around the only host, with their members: first those that need attention, then the largest. */
function spokesOf(shown) {
  const slow = new Set(shown.slow.filter((each) => each.kind === "member").map((each) => each.where));
  const grade = ({ name, members }) => (members.length && members.every((each) => each.state === "silent") ? "bad" : slow.has(name) ? "warn" : "up");
  const worth = { bad: 0, warn: 1, up: 2 };
  const found = shown.clusters.filter((each) => each.total).map((each) => ({ name: each.name, members: each.total, grade: grade(each) }));
  return found.sort((a, b) => worth[a.grade] - worth[b.grade] || b.members - a.members || a.name.localeCompare(b.name)).slice(0, SPOKES);
}

/** Draw hosts and links of this site, or the only host with its clusters, and the other sites beside it (below it on a small screen). */
function drawMap(shown) {
  const box = $("drawing");
  const own = shown.sites.find((site) => site.own);
  const others = shown.sites.filter((site) => !site.own);
  const hosts = new Map();
  const rank = { away: 0, suspended: 0, draining: 1, up: 2 };
  for (const relay of [...shown.relays].sort((a, b) => b.asked - a.asked || rank[a.state] - rank[b.state] || a.host.localeCompare(b.host))) {
    if (hosts.size < HOSTS) hosts.set(relay.id || relay.address, relay);
  }
  const width = Math.max(280, box.parentElement.clientWidth - 2);
  const aside = width >= 640 && others.length > 0;
  const inner = aside ? width * 0.64 : width;
  const middle = [...hosts.values()];
  const spokes = middle.length === 1 ? spokesOf(shown) : [];
  const high = spokes.length > 2 ? 260 : middle.length < 3 ? 170 : middle.length < 9 ? 260 : 380;
  const siteHigh = 58;
  const height = aside ? Math.max(high, others.length * (siteHigh + 12) + 32) : high + (others.length ? others.length * (siteHigh + 12) + 20 : 0);
  const edges = shown.links.filter((link) => hosts.has(link.relay) && hosts.has(link.peer));
  const sign = JSON.stringify([width, middle.map((h) => [h.id, h.host, h.state]), edges.map((l) => [l.relay, l.peer, l.state, ms(l.rtt_ms)]), shown.sites.map((s) => [s.name, s.state, ms(s.rtt_ms)]), spokes]);
  if (box.sign === sign) return;
  box.sign = sign;
  if (!middle.length) return box.replaceChildren();

  const places = new Map();
  const [x0, y0] = [inner / 2, high / 2 + 2];
  const asked = middle.filter((host) => host.asked);
  const around = asked.length === 1 && middle.length > 2 ? middle.filter((host) => host !== asked[0]) : middle;
  if (around !== middle) places.set(asked[0].id || asked[0].address, [x0, y0]);
  around.forEach((host, index) => {
    const first = around.length === 2 ? Math.PI : around.length % 2 ? -Math.PI / 2 : -Math.PI / 2 + Math.PI / around.length;
    const turn = first + (2 * Math.PI * index) / around.length;
    const [rx, ry] = around.length === 1 ? [0, 0] : [Math.min(inner * 0.37, 300), high * 0.3];
    places.set(host.id || host.address, [x0 + rx * Math.cos(turn), y0 + ry * Math.sin(turn)]);
  });

  const picture = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  picture.setAttribute("aria-label", `Map of ${plural(hosts.size, "host")}${spokes.length ? ` with ${plural(spokes.length, "cluster")}` : ""} and ${plural(others.length, "other site")}; the tables below say the same.`);
  const frame = make("g", { class: "site" }, make("rect", { x: 10, y: 10, width: inner - 20, height: high - 20, rx: 8 }));
  frame.append(make("text", { x: 22, y: 28 }, own?.name ? `site ${cut(own.name, 30)}` : "this site"));
  picture.append(frame);
  const labels = [];
  const drawn = new Set();
  for (const link of edges) {
    const pair = [link.relay, link.peer].sort().join();
    if (drawn.has(pair)) continue;
    drawn.add(pair);
    const [[ax, ay], [bx, by]] = [places.get(link.relay), places.get(link.peer)];
    picture.append(make("line", { x1: ax, y1: ay, x2: bx, y2: by, "data-state": link.state === "up" ? "up" : "bad" }));
    const at = middle.length > 9 ? 0.62 : 0.5;
    if (link.rtt_ms != null && drawn.size <= 30) labels.push(make("text", { class: "rtt", x: ax + (bx - ax) * at, y: ay + (by - ay) * at + 4, "text-anchor": "middle" }, ms(link.rtt_ms)));
  }
  spokes.forEach(({ name, members, grade }, index) => {
    const turn = -Math.PI / 2 + (2 * Math.PI * (index + (spokes.length === 2 ? 0.5 : 0))) / spokes.length;
    const [x, y] = [x0 + Math.min(inner * 0.37, 300) * Math.cos(turn), y0 + high * 0.3 * Math.sin(turn)];
    picture.append(make("line", { x1: x0, y1: y0, x2: x, y2: y, "data-state": grade === "bad" ? "bad" : "up" }));
    const group = make("g", { class: "host cluster", "data-state": grade, "data-cluster": name }, make("title", {}, `${name}: ${plural(members, "member")}`), make("circle", { cx: x, cy: y, r: 7 }));
    group.append(make("text", { x, y: y < y0 - 20 ? y - 13 : y + 22, "text-anchor": "middle" }, `${cut(name, 20)} ${count(members)}`));
    picture.append(group);
  });
  others.forEach((site, index) => {
    const y = aside ? (height - others.length * (siteHigh + 12) + 12) / 2 + index * (siteHigh + 12) : high + 14 + index * (siteHigh + 12);
    const x = aside ? inner + (width - inner) * 0.38 : width * 0.3;
    const wide = width - x - 10;
    const from = aside ? [inner - 10, Math.min(Math.max(y + siteHigh / 2, 30), high - 30)] : [24, high - 10];
    const to = [x, y + siteHigh / 2];
    const down = site.state === "up" ? "up" : "bad";
    picture.append(make("line", { x1: from[0], y1: from[1], x2: to[0], y2: to[1], "data-state": down }));
    if (site.rtt_ms != null) labels.push(make("text", { class: "rtt between", x: (from[0] + to[0]) / 2, y: (from[1] + to[1]) / 2 + 4, "text-anchor": "middle" }, ms(site.rtt_ms)));
    const group = make("g", { class: "site host", "data-state": down }, make("rect", { x, y, width: wide, height: siteHigh, rx: 8 }));
    group.append(make("text", { x: x + 12, y: y + 18 }, `site ${cut(site.name, 24)}`), make("text", { x: x + 12, y: y + 42 }, site.state === "up" ? plural(site.clusters, "cluster") : site.state));
    picture.append(group);
  });
  picture.append(...labels);
  for (const [id, host] of hosts) {
    const [x, y] = places.get(id);
    const grade = STATES[host.state] === "bad" ? "bad" : host.state === "draining" ? "warn" : host.asked ? "asked" : "far";
    const words = host.state === "up" ? "" : ` (${host.state})`;
    const group = make("g", { class: "host", "data-state": grade, "data-host": host.host }, make("title", {}, `${host.host} ${host.id} ${host.address}`), make("circle", { cx: x, cy: y, r: host.asked ? 11 : 9 }));
    const above = y < y0 - 20;
    group.append(make("text", { x, y: above ? y - 17 : y + 27, "text-anchor": "middle" }, cut(host.host || host.address || brief(id), middle.length > 8 ? 14 : 24) + words));
    picture.append(group);
  }
  box.replaceChildren(picture);
}

// -- drawing ------------------------------------------------------------------------------------------------------------

function draw() {
  const shown = state();
  if (!shown) return;
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const hosts = new Map(shown.relays.map((relay) => [relay.id, relay.host])); // a link that is lost does not name its other end
  const failing = new Set(shown.slow.filter((each) => each.kind === "program").map((each) => `${each.host} ${each.who}`));
  const rows = {
    ...shown,
    links: shown.links.map((link) => ({ ...link, peer_host: link.peer_host || hosts.get(link.peer) || "" })),
    slow: slowRows(shown),
    drops: dropRows(shown),
    programs: shown.programs.map((row) => ({ ...row, key: `${row.relay} ${row.session}`, slow: failing.has(`${row.host} ${row.label} (pid ${row.pid})`) })),
    consumers: shown.streams.flatMap((stream) => stream.consumers.map((each) => ({ ...each, stream: stream.name, uuid: stream.uuid, dead_letters: stream.dead_letters, key: `${stream.uuid} ${each.name}` }))),
    account: shown.relays.filter((relay) => relay.asked),
  };
  let left = 0;
  left += tables.clusters.show(clusterRows(shown, words), !words.length);
  for (const table of ["slow", "drops", "relays", "links", "sites", "programs", "streams", "consumers", "account"]) {
    left += tables[table].show(tables[table].chosen(rows[table], words), !words.length);
  }
  $("filtered").textContent = words.length ? "showing rows that match" : left ? `${plural(left, "row")} beyond the first ${ROWS} of a table not shown; filter to find them` : "";
  const found = alerts(shown);
  drawFigures();
  drawAlerts(found);
  drawMap(shown);
  const asked = shown.relays.filter((relay) => relay.asked);
  $("where").textContent = asked.map((relay) => [relay.host || relay.address, relay.site && `site ${relay.site}`].filter(Boolean).join(", ")).join(" · ");
  const worst = found.filter(([grade]) => grade === "bad").length;
  document.title = `${worst ? `(${worst}) ` : ""}Iris${asked.length ? ` · ${asked[0].host}` : ""}`;
  $("sites").hidden = shown.sites.every((site) => site.own);
  $("streams-empty").textContent = "No stream is known under the keys that the dashboard holds.";
  $("page").hidden = false;
}

// -- actions ------------------------------------------------------------------------------------------------------------

const ACTIONS = {
  pause: ["Pause", (row) => `${row.name} receives nothing of ${row.stream} until it is resumed. Nothing is lost: its lag grows.`],
  resume: ["Resume", (row) => `${row.name} receives messages of ${row.stream} again.`],
  redrive: ["Redrive", (row) => `The messages of all dead letters of ${row.name} are delivered to its workers again, as if for the first time, and the letters are deleted. Stream ${row.stream} has ${plural(row.dead_letters, "dead letter")}.`],
};

/** Return the buttons of a consumer's row: those that this token may press. */
function buttonsOf(row) {
  const button = (act, text) => ({ act, text, label: `${text} ${row.name} of ${row.stream}` });
  const buttons = [];
  if (row.dead_letters && hello.may.includes("peek")) buttons.push(button("peek", "Peek"));
  if (!hello.may.includes("manage")) return buttons;
  if (row.dead_letters) buttons.push(button("redrive", "Redrive"));
  return [...buttons, row.paused ? button("resume", "Resume") : button("pause", "Pause")];
}

/** Send a request with the token. Return the document of its answer; throw an Error with a sentence if it failed. */
async function call(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { Authorization: `Bearer ${token}`, ...options.headers }, cache: "no-store" });
  } catch {
    throw new Error("the dashboard does not answer");
  }
  const document = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(document.detail || `the dashboard answered ${response.status}`);
  return document;
}

let asked = null; // [action, row] of the question that is open

function ask(act, row) {
  if (act === "peek") return peek(row);
  asked = [act, row];
  const [text, says] = ACTIONS[act];
  $("ask-title").textContent = `${text} ${row.name}?`;
  $("ask-text").textContent = says(row);
  $("ask-yes").textContent = text;
  $("ask-yes").disabled = false;
  $("ask-error").hidden = true;
  $("ask").showModal();
  $("ask-no").focus();
}

async function answer() {
  const [action, row] = asked;
  $("ask-yes").disabled = true;
  $("ask-error").hidden = true;
  try {
    const order = { action, stream: row.stream, consumer: row.name, uuid: row.uuid };
    const { done } = await call("actions", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(order) });
    $("ask").close();
    say(done);
  } catch (error) {
    $("ask-error").textContent = error.message;
    $("ask-error").hidden = false;
    $("ask-yes").disabled = false;
  }
}

async function peek(row) {
  $("peek-title").textContent = `Dead letters of ${row.name}`;
  $("peek-note").textContent = "Opening…";
  letters.show([]);
  $("peek").showModal();
  try {
    const found = await call(`dead-letters?${new URLSearchParams({ stream: row.stream, uuid: row.uuid, consumer: row.name })}`);
    const first = found.letters.length > 1 ? `The oldest ${found.letters.length}, as they are in the stream. They stay there.` : "They stay in the stream.";
    $("peek-note").textContent = found.letters.length ? first : `${row.name} has no dead letters.`;
    letters.show(found.letters);
  } catch (error) {
    $("peek-note").textContent = error.message;
  }
}

const when = (us) => new Date(us / 1000).toLocaleString();
const letters = new Table(
  "peek",
  [
    column("Offset", null, (row) => count(row.offset)),
    column("Why", null, (row) => [row.why, { more: true, text: ` ${plural(row.deliveries, "delivery").replace("deliverys", "deliveries")}` }], { class: "why" }),
    column("Topic", null, (row) => row.topic),
    column("Stored", null, (row) => when(row.stored_us)),
    column("Payload", null, (row) => [{ pre: row.payload }, { more: true, text: `${bytes(row.bytes)}${row.binary ? ", binary" : ""}${Object.entries(row.headers).map(([key, value]) => `; ${key}: ${value}`).join("")}` }], { class: "text" }),
  ],
  { key: (row) => String(row.offset) },
);

let saying = null;

function say(text) {
  clearTimeout(saying);
  $("said").textContent = text;
  $("said").hidden = false;
  saying = setTimeout(() => ($("said").hidden = true), SAID_MS);
}

// -- the stream of events ---------------------------------------------------------------------------------------------

let token = "";
let reading = null; // the AbortController of the stream that is read

function live(name, text) {
  const element = $("live");
  element.dataset.state = name;
  if (element.textContent !== text) element.textContent = text;
}

/** Take the token out of the address, where it is not sent to anybody; else the one of this tab. */
function findToken() {
  const given = /^#token=(.+)$/.exec(location.hash);
  if (given) {
    sessionStorage.setItem(TOKEN, decodeURIComponent(given[1]));
    window.history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem(TOKEN) ?? "";
}

function showDoor(why) {
  if (why) $("door-why").textContent = why;
  $("page").hidden = true;
  $("door").hidden = false;
  live("wait", "no token");
  $("token").focus();
}

/** Yield [name, data] for each event of a response. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const fields = Object.fromEntries(part.split("\n").map((line) => line.split(/: ?(.*)/s, 2)));
      yield [fields.event ?? "", fields.data ?? ""];
    }
  }
}

/** Read the stream once. Return whether another try makes sense; it has waited as long as the server wants. */
async function read(onEvent) {
  reading = new AbortController();
  let alarm = null;
  const awake = () => {
    clearTimeout(alarm);
    alarm = setTimeout(() => reading.abort(), SILENT_MS);
  };
  try {
    awake();
    const response = await fetch("events", { headers: { Authorization: `Bearer ${token}` }, signal: reading.signal, cache: "no-store" });
    if (response.status === 401 || response.status === 403) {
      sessionStorage.removeItem(TOKEN);
      showDoor("This token is not valid. Paste another, or open the address that iris dashboard printed.");
      return false;
    }
    if (response.status === 429 || response.status === 503) {
      const seconds = Number(response.headers.get("Retry-After")) || 10;
      live("lost", response.status === 429 ? `too many wrong tokens; trying again in ${seconds} s` : `too many pages are open; trying again in ${seconds} s`);
      clearTimeout(alarm);
      await new Promise((resolve) => setTimeout(resolve, seconds * 1000));
      return true;
    }
    if (!response.ok) return true;
    for await (const [event, data] of eventsOf(response)) {
      awake();
      onEvent(event, data);
    }
  } catch {
    // The server is away, or said nothing for too long: the caller shows that and tries again.
  } finally {
    clearTimeout(alarm);
    reading.abort();
  }
  return true;
}

async function follow() {
  $("door").hidden = true;
  for (let failures = 0; ; failures++) {
    const again = await read((event, data) => {
      failures = 0;
      if (event === "hello") {
        hello = JSON.parse(data);
        history = hello.history;
      } else if (event === "network") {
        network = JSON.parse(data);
        history = [...history, totals(network)].slice(-POINTS);
        if (!frozen) {
          live("live", hello.read_only ? "live, read-only" : "live");
          draw();
        }
      }
    });
    if (!again) return;
    if ($("live").dataset.state !== "lost" || failures < 2) live("lost", "the dashboard does not answer; trying again");
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));
  }
}

// -- keys, buttons -------------------------------------------------------------------------------------------------------

function freeze() {
  frozen = frozen ? null : network;
  $("freeze").setAttribute("aria-pressed", String(Boolean(frozen)));
  $("freeze").textContent = frozen ? "Go on" : "Freeze";
  if (frozen) live("frozen", "frozen");
  draw();
}

function step(by) {
  const rows = [...document.querySelectorAll("main tbody tr")].filter((row) => row.offsetParent);
  const at = rows.indexOf(document.activeElement?.closest("tr"));
  rows[at < 0 ? 0 : Math.min(Math.max(at + by, 0), rows.length - 1)]?.focus();
}

const KEYS = {
  "/": () => $("filter").focus(),
  "?": () => $("help").showModal(),
  f: freeze,
  j: () => step(1),
  k: () => step(-1),
  Enter: () => document.activeElement?.matches("tr") && document.activeElement.querySelector(".open")?.click(),
};

document.addEventListener("keydown", (event) => {
  const inField = event.target.matches("input");
  if (event.key === "Escape" && event.target === $("filter")) {
    $("filter").value = "";
    $("filter").blur();
    draw();
  }
  if (inField || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]") || $("page").hidden) return;
  const section = document.querySelectorAll("nav a")[Number(event.key) - 1];
  if (event.key === "Enter" && !event.target.matches("tr")) return;
  const does = KEYS[event.key] ?? (section && (() => { section.click(); document.querySelector(section.hash).focus(); })); // prettier-ignore
  if (does) {
    event.preventDefault();
    does();
  }
});

$("filter").addEventListener("input", draw);
$("freeze").addEventListener("click", freeze);
$("help-button").addEventListener("click", () => $("help").showModal());
$("ask-no").addEventListener("click", () => $("ask").close());
$("ask-yes").addEventListener("click", answer);
$("peek-close").addEventListener("click", () => $("peek").close());
$("help-close").addEventListener("click", () => $("help").close());
$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value.trim();
  $("token").value = "";
  sessionStorage.setItem(TOKEN, token);
  follow();
});
new ResizeObserver(() => state() && drawMap(state())).observe($("map"));
window.addEventListener("hashchange", () => {
  if (location.hash.startsWith("#token=")) location.reload();
});

token = findToken();
if (token) follow();
else showDoor("");
