// The page of the demo: see demo.py. What comes from other programs is shown with textContent, never as HTML.
import { connect, RequestError } from "./iris.js";

const STREAM = "departures";
const ROOM = "rooms.lobby";
const CLUSTER = "delays";
const LINES = 15;

const [name, password] = location.hash.slice(1).split(":");
const find = (id) => document.getElementById(id);
const show = (id, text) => (find(id).textContent = text);

/** What this page has counted; the demo's own accounts must agree. */
const counted = {
  board: { first: null, last: null, received: 0, missed: 0, gaps: 0 },
  chart: { last: null, flights: 0, carriers: {}, minutes: {}, gaps: 0 },
};
globalThis.counted = counted;

async function post(path, body = {}) {
  const answer = await fetch(path, { method: "POST", body: JSON.stringify(body) });
  return { ok: answer.ok, ...(await answer.json()) };
}

async function logIn() {
  const given = await post("login", { name, password });
  if (!given.ok) throw new Error(given.error);
  return given;
}

/** A new ticket, for the cookie that the login has set. In another tab, somebody else may have logged in since. */
async function renew() {
  const given = await post("ticket");
  return given.name === name ? given : logIn();
}

function line(id, text, { atTop = false } = {}) {
  const item = document.createElement("li");
  item.textContent = text;
  const list = find(id);
  list[atTop ? "prepend" : "append"](item);
  if (list.children.length > LINES) (atTop ? list.lastChild : list.firstChild).remove();
}

/** A subscription: what is published while this page is away is missed, and the client reports that. */
async function followBoard(client, topic) {
  const { board } = counted;
  const onLoss = ({ count, cause }) => {
    board.gaps++;
    line("gaps", `${count ?? "an unknown number of"} departures were missed: ${cause}`);
  };
  for await (const { text, headers } of client.subscribe(`${topic}.>`, { onLoss })) {
    // The publisher numbers the departures of each board, so this page can check what the client reports.
    const number = Number(headers.number);
    board.first ??= number;
    board.missed += number - (board.last ?? number - 1) - 1;
    board.last = number;
    board.received++;
    const cells = text.split(",");
    const delay = cells[5] === "NA" ? "cancelled" : `${cells[5]} min`;
    line("board", `${cells[9]} ${cells[10]}  ${cells[12]} → ${cells[13]}  ${delay}`, { atTop: true });
    show("board-state", `${board.received} received, ${board.missed} missed, ${board.gaps} gaps reported`);
  }
}

/** A stream: the client goes on behind the last offset that it has read, so nothing is missed and nothing comes twice. */
async function followChart(client) {
  const { chart } = counted;
  const onGap = () => chart.gaps++;
  for await (const { text, offset } of client.streams.read(STREAM, { start: "first", onGap })) {
    chart.last = offset;
    const cells = text.split(",");
    const carrier = cells[9];
    chart.flights++;
    chart.carriers[carrier] = (chart.carriers[carrier] ?? 0) + 1;
    chart.minutes[carrier] = (chart.minutes[carrier] ?? 0) + (Number(cells[5]) || 0);
    drawLater();
  }
}

let drawing = false;
function drawLater() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    draw();
  });
}

function draw() {
  const { flights, carriers, minutes, gaps } = counted.chart;
  show("chart-state", `${flights} departures, ${gaps} gaps`);
  const bars = Object.keys(carriers).sort().map((carrier) => [carrier, minutes[carrier] / carriers[carrier]]);
  const longest = Math.max(10, ...bars.map(([, delay]) => delay));
  find("chart").replaceChildren(...bars.flatMap(([carrier, delay], i) => {
    const y = 17 * i;
    const width = (300 * Math.max(0, delay)) / longest;
    return [
      shape("text", { x: 0, y: y + 12 }, carrier),
      shape("rect", { x: 30, y: y + 1, width, height: 14 }),
      shape("text", { x: 36 + width, y: y + 12 }, delay.toFixed(1)),
    ];
  }));
}

function shape(kind, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

/** A room: a stream that everybody in it reads and appends to. A new guest sees what was said before. */
async function followRoom(client) {
  for await (const { value } of client.streams.read(ROOM, { start: "first" })) {
    line("room", `${value?.from}: ${value?.text}`); // whoever has the key of the room can write any name
  }
}

function onSubmit(id, output, act) {
  find(id).onsubmit = async (event) => {
    event.preventDefault();
    try {
      show(output, await act(event.target.elements));
    } catch (error) {
      const again = error instanceof RequestError && !error.mayHaveRun ? "; try again" : "";
      show(output, `${error.message}${again}`);
    }
  };
}

async function run() {
  let given = await logIn();
  const [board] = Object.keys(given.keys.topics); // the one that this person has a key of
  show("board-name", board.split(".")[1]);
  const client = await connect({
    relay: given.relay,
    keyring: given.keys,
    label: name,
    reconnectMaxMs: 2000,
    // Called for every connection, and before a ticket expires.
    ticket: async () => {
      const { ticket } = given ?? (await renew());
      given = null;
      return ticket;
    },
    onLoss: ({ cause }) => show("state", cause),
  });
  onSubmit("ask", "answer", async ({ carrier }) => {
    const { flights, minutes } = await client.request(CLUSTER, carrier.value, { idempotent: true });
    return flights ? `${flights} departures, ${(minutes / flights).toFixed(1)} min late on average` : "no departures yet";
  });
  onSubmit("say", "said", async ({ text }) => {
    await client.streams.append(ROOM, { from: name, text: text.value }); // on disk when this returns
    text.value = "";
    return "";
  });
  setInterval(() => {
    if (client.connected) show("state", `connected as ${name}; this page seals and opens by itself`);
  }, 200);
  await Promise.all([followBoard(client, board), followChart(client), followRoom(client)]);
}

run().catch((error) => show("state", `${error.name}: ${error.message}`));
