// The chat page: talks to the server by its own routes, as any client does.
// `document.body.dataset.state` is opening, idle, running, finished or failed.
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const [talk, status, question, served] = ["talk", "status", "question", "served"].map(byId);
  // Of a page whose end counts as being seen.
  const NEAR_PX = 80;
  // What was said, as the server takes it.
  let messages = [];
  // What ends the answer that comes.
  let leave = null;
  let facts = null;

  const number = (value, digits) =>
    value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

  function became(state, sentence) {
    document.body.dataset.state = state;
    status.textContent = sentence;
    const running = state === "running";
    byId("send").disabled = running;
    byId("stop").disabled = !running;
    byId("again").disabled = running || messages.at(-1)?.role !== "assistant";
  }

  // --- What the server is asked ---

  const headers = () => {
    const key = sessionStorage.getItem("key");
    return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  };

  async function problem(response) {
    if (response.status === 401) byId("unlock").hidden = false;
    try {
      return (await response.json()).error.message;
    } catch {
      return `the server answered with status ${response.status}`;
    }
  }

  async function meet() {
    const response = await fetch("v1/speq", { headers: headers() });
    if (!response.ok) {
      became("failed", `The server refuses: ${await problem(response)}.`);
      return;
    }
    facts = await response.json();
    const drafter = facts.drafter === null ? "no draft" : `drafts by ${facts.drafter}`;
    served.textContent = `${facts.model}, context ${number(facts.max_model_len, 0)} tokens, ${drafter}`;
    if (facts.chat === null) served.textContent += "; it has no chat template, so it continues your text";
    became("idle", "Ask the model something.");
  }

  function body() {
    const asked = { stream: true, stream_options: { include_usage: true }, return_progress: true, timings_per_token: true };
    for (const name of ["temperature", "top_p", "seed", "max_tokens"]) {
      const { value } = byId(name);
      if (value !== "") asked[name] = Number(value);
    }
    if (facts?.chat === null) return { ...asked, prompt: messages.at(-1).content };
    const system = byId("system").value.trim();
    return { ...asked, messages: [...(system ? [{ role: "system", content: system }] : []), ...messages] };
  }

  // Objects of a stream of server-sent events.
  async function* events(response) {
    const reader = response.body.getReader();
    const decoder = new TextDecoder();
    for (let held = ""; ; ) {
      const { done, value } = await reader.read();
      if (done) return;
      held += decoder.decode(value, { stream: true });
      const frames = held.split("\n\n");
      held = frames.pop();
      for (const frame of frames) {
        if (frame.startsWith("data: {")) yield JSON.parse(frame.slice("data: ".length));
      }
    }
  }

  // --- What is shown ---

  function added(parent, tag, name, text = "") {
    const made = document.createElement(tag);
    if (name) made.className = name;
    made.textContent = text;
    parent.append(made);
    return made;
  }

  function turn(role, text) {
    const made = added(talk, "section", `turn ${role}`);
    made.classList.toggle("costs", byId("costs").checked);
    added(made, "h2", "", role === "user" ? "You" : "Model");
    made.text = added(made, "div", "text", text);
    return made;
  }

  function follow() {
    const page = document.documentElement;
    if (page.scrollTop + page.clientHeight > page.scrollHeight - 2 * NEAR_PX) {
      page.scrollTop = page.scrollHeight;
    }
  }

  function show(shown, piece, timings) {
    const span = added(shown.text, "span", "token", piece);
    if (timings) {
      span.classList.add(timings.origin === "accepted" ? "accepted" : "exact");
      span.classList.toggle("waited", timings.waited_ms > 0);
      const waited = timings.waited_ms > 0 ? `waited ${number(timings.waited_ms, 1)} ms for experts` : "waited for nothing";
      span.title = timings.origin === "accepted" ? `drafted and kept; its step ${waited}` : `chosen by the exact model; its step ${waited}`;
    }
  }

  function think(shown, piece) {
    if (!shown.thought) {
      const details = document.createElement("details");
      details.className = "thought";
      added(details, "summary", "", "Thought");
      shown.thought = added(details, "div");
      shown.text.before(details);
    }
    shown.thought.textContent += piece;
  }

  const pace = (timings) =>
    timings?.predicted_per_second == null ? "" : `, ${number(timings.predicted_per_second, 1)} tokens/s`;

  function figures(answer) {
    const parts = [`${number(answer.count, 0)} tokens${pace(answer.timings)}`];
    if (answer.first_ms !== null) parts.push(`the first after ${number(answer.first_ms / 1e3, 2)} s`);
    const drafted = answer.accepted / Math.max(answer.count, 1);
    if (answer.accepted) parts.push(`${number(100 * drafted, 0)} % of them drafted`);
    parts.push(`waited ${number(answer.waited_ms / 1e3, 2)} s for experts`);
    return `${parts.join(", ")}.`;
  }

  // --- A turn ---

  async function answer() {
    const shown = turn("assistant", "");
    const told = { text: "", count: 0, accepted: 0, waited_ms: 0, first_ms: null, timings: null };
    const begun_ms = performance.now();
    const route = facts?.chat === null ? "v1/completions" : "v1/chat/completions";
    leave = new AbortController();
    became("running", "Running the prompt.");
    follow();
    let end = null;
    try {
      const asked = { method: "POST", headers: headers(), body: JSON.stringify(body()), signal: leave.signal };
      const response = await fetch(route, asked);
      if (!response.ok) throw new Error(await problem(response));
      for await (const chunk of events(response)) {
        if (chunk.error) throw new Error(chunk.error.message);
        hear(chunk, shown, told, begun_ms);
        end = chunk.choices?.[0]?.finish_reason ?? end;
      }
    } catch (error) {
      end = error.name === "AbortError" ? "stopped" : error;
    }
    leave = null;
    if (end instanceof Error && told.count === 0) {
      shown.remove();
      question.value = messages.pop().content;
      talk.lastElementChild?.remove();
      became("failed", `It failed: ${end.message}. Your message was taken back.`);
      return;
    }
    messages.push({ role: "assistant", content: told.text });
    added(shown, "p", "figures", figures(told));
    const why = { length: "Cut off: as many tokens as were asked for, or as the context holds", stopped: "Stopped" };
    became(end instanceof Error ? "failed" : "finished", end instanceof Error ? `It failed: ${end.message}.` : `${why[end] ?? "Finished"}.`);
    follow();
  }

  function hear(chunk, shown, told, begun_ms) {
    const progress = chunk.prompt_progress;
    if (progress && told.count === 0) {
      status.textContent = progress.requests_ahead
        ? `Waiting: ${progress.requests_ahead} requests are ahead.`
        : `Running the prompt: ${number(progress.processed, 0)} of ${number(progress.total, 0)} tokens.`;
    }
    const choice = chunk.choices?.[0];
    const piece = choice?.text ?? choice?.delta?.content ?? "";
    const thought = choice?.delta?.reasoning_content ?? "";
    if (chunk.timings) {
      told.first_ms ??= performance.now() - begun_ms;
      // Chunks of one token have its number.
      if (chunk.timings.predicted_n > told.count) {
        told.count = chunk.timings.predicted_n;
        told.accepted += chunk.timings.origin === "accepted" ? 1 : 0;
        told.waited_ms += chunk.timings.waited_ms;
      }
      told.timings = chunk.timings;
      status.textContent = `${thought ? "Thinking" : "Answering"}: ${number(told.count, 0)} tokens${pace(told.timings)}.`;
    }
    if (thought) think(shown, thought);
    if (piece) {
      told.text += piece;
      show(shown, piece, chunk.timings);
    }
    follow();
  }

  function ask(text) {
    messages.push({ role: "user", content: text });
    turn("user", text);
    return answer();
  }

  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = question.value.trim();
    if (!text || leave !== null) return;
    question.value = "";
    ask(text);
  });
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("ask").requestSubmit();
  });
  byId("stop").addEventListener("click", () => leave?.abort());
  byId("again").addEventListener("click", () => {
    messages.pop();
    talk.lastElementChild?.remove();
    answer();
  });
  byId("new").addEventListener("click", () => {
    leave?.abort();
    messages = [];
    talk.replaceChildren();
    became("idle", "Ask the model something.");
    question.focus();
  });
  byId("costs").addEventListener("change", ({ target }) => {
    byId("key-of-costs").hidden = !target.checked;
    for (const each of talk.children) each.classList.toggle("costs", target.checked);
  });
  byId("unlock").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem("key", byId("key").value);
    byId("unlock").hidden = true;
    meet();
  });
  meet().catch(() => became("failed", "The server does not answer; is speq still running?"));
})();
