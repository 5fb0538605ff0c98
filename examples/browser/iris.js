// A client of `iris bridge http` for web pages: calls, and events that go on after the connection was lost.

export class Bridge {
  constructor(address, token) {
    this.address = address;
    this.headers = { authorization: `Bearer ${token}` };
  }

  // Return the reply of a member as a Response. A problem is thrown; its `may_have_run` says whether to ask again.
  async request(cluster, body) {
    const path = `/clusters/${encodeURIComponent(cluster)}/request`;
    const answer = await fetch(this.address + path, { method: "POST", headers: this.headers, body });
    if (!answer.ok) throw Object.assign(new Error("the request failed"), await answer.json());
    return answer;
  }

  // Yield [event, data, id] of a topic or stream until `signal` aborts. A stream is resumed where it was.
  async *events(path, { signal, last = "" } = {}) {
    for (let pause = 100; !signal?.aborted; pause = Math.min(2 * pause, 5000)) {
      try {
        const resume = last ? { "last-event-id": last } : {};
        const answer = await fetch(this.address + path, { headers: { ...this.headers, ...resume }, signal });
        if (!answer.ok) throw Object.assign(new Error("no events"), await answer.json());
        for await (const event of parse(answer.body)) {
          pause = 100;
          last = event[2] || last;
          yield event;
        }
      } catch (error) {
        if (error.status >= 400 && error.status < 500 && error.status !== 429) throw error;
      }
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  }
}

// EventSource sends no Authorization header, so the format (HTML Living Standard, 9.2) is read here.
async function* parse(body) {
  let rest = "";
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const blocks = (rest + part.value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const field = (name) => block.split("\n").filter((line) => line.startsWith(`${name}: `)).map((line) => line.slice(name.length + 2)).join("\n");
        if (field("data")) yield [field("event"), JSON.parse(field("data")), field("id")];
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // whoever leaves the loop ends the connection
  }
}
