// The live page: asks the server for a completion as any client does, and shows what the server tells
// of the request that it watches (speq/dashboard/live), which may be another client's.
// `document.body.dataset.state` is idle, running, finished or failed.
"use strict";
(() => {
  const token = new URLSearchParams(location.search).get("token") ?? "";
  const byId = (id) => document.getElementById(id);
  const [text, asked, tokens, status] = ["text", "asked", "tokens", "status"].map(byId);
  // Of a scrolled text whose end counts as being seen.
  const NEAR_PX = 40;
  const MIB = 1 << 20;
  // While a run goes on, pictures are drawn in one part of the time and left alone in so many: on the
  // machine of the run, what draws them takes its processor.
  const REST = 5;

  // --- What a run has come to ---

  // count, steps: of tokens and of steps that emitted them; first_ms, last_ms: when tokens came
  let run = null;
  let panels = null;
  let due = false;
  let drawing = false;
  let hurry = () => {};

  function became(state, sentence) {
    document.body.dataset.state = state;
    status.textContent = sentence;
  }

  const number = (value, digits) =>
    value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

  // As the server measured it or, before it has told, as tokens came.
  function tokenMs() {
    if (run.stats?.tpot_ms != null) return run.stats.tpot_ms;
    return run.count > 1 ? (run.last_ms - run.first_ms) / (run.count - 1) : null;
  }

  function figures() {
    const { stats } = run;
    const shown = [["Tokens", number(run.count, 0)]];
    const add = (what, value, write) => shown.push([what, value == null ? "–" : write(value)]);
    add("Time a token", tokenMs(), (value) => `${number(value, 1)} ms`);
    add("Tokens a step", stats?.accept_length_mean, (value) => number(value, 2));
    add("Experts in slots (hit rate)", stats?.hit_rate, (value) => `${number(100 * value, 1)} %`);
    add("Moved a token", stats?.moved_bytes_per_token, (value) => `${number(value / MIB, 2)} MiB`);
    return shown;
  }

  const spoken = (pairs) => pairs.map(([what, value]) => `${what.toLowerCase()} ${value}`).join(", ");

  // Once a frame at most, and not at all where nobody looks.
  function later() {
    if (due) return;
    due = true;
    requestAnimationFrame(() => {
      due = false;
      if (run !== null) speqPage.facts(figures());
      if (!drawing) draw();
    });
  }

  async function draw() {
    drawing = true;
    while (panels !== null) {
      const begun_ms = performance.now();
      const these = panels;
      panels = null;
      await speqPage.show(these);
      const took_ms = performance.now() - begun_ms;
      if (document.body.dataset.state !== "running") continue;
      await new Promise((resolve) => {
        hurry = resolve;
        setTimeout(resolve, REST * took_ms);
      });
    }
    drawing = false;
  }

  // --- Events of the server ---

  const heard = {
    begun({ prompt, run: number }) {
      run = { number, count: 0, first_ms: 0, last_ms: 0, stats: null };
      asked.textContent = prompt;
      tokens.replaceChildren();
      became("running", "Running the prompt.");
      later();
    },

    prompt({ done, total }) {
      if (run.count === 0) status.textContent = `Running the prompt: ${done} of ${total}.`;
    },

    token({ text: piece, origin, waited_ms, step }) {
      if (run.count === 0) {
        run.first_ms = performance.now();
        status.textContent = "Generating.";
      }
      run.last_ms = performance.now();
      run.count += 1;
      const ended = text.scrollTop + text.clientHeight > text.scrollHeight - NEAR_PX;
      const span = document.createElement("span");
      span.textContent = piece;
      span.className = `token ${origin === "accepted" ? "accepted" : "exact"}`;
      span.classList.toggle("waited", waited_ms > 0);
      const waited = waited_ms > 0 ? `waited ${number(waited_ms, 1)} ms for experts` : "waited for nothing";
      span.title = `step ${step}, which ${waited}`;
      tokens.append(span);
      if (ended) text.scrollTop = text.scrollHeight;
      later();
    },

    panels(told) {
      run.stats = told.stats;
      panels = told.panels;
      later();
    },

    finished({ finish_reason, stats }) {
      run.stats = stats;
      const why = {
        eos: "The model ended the text",
        length: "As many tokens as were asked for",
        stop: "A stop text came",
        stopped: "Stopped",
      }[finish_reason];
      became("finished", `${why}: ${spoken(figures())}.`);
      hurry();
      later();
    },

    failed({ error }) {
      became("failed", `It failed: ${error}.`);
      hurry();
    },
  };

  const events = new EventSource(`events?${new URLSearchParams({ token })}`);
  for (const [kind, hear] of Object.entries(heard)) {
    events.addEventListener(kind, (event) => hear(JSON.parse(event.data)));
  }
  events.addEventListener("error", () => {
    const gone = events.readyState === EventSource.CLOSED;
    const what = gone ? "The server refuses this address; open the one that it printed." : "The server does not answer; is speq still running?";
    became("failed", what);
  });
  events.addEventListener("open", () => {
    if (run === null) became("idle", "Nothing was generated yet.");
  });

  // --- What is asked for ---

  // Ends the request of this page; null: there is none.
  let own = null;

  function asks(controller) {
    own = controller;
    byId("generate").disabled = own !== null;
    byId("stop").disabled = own === null;
  }

  async function request(path, options = {}) {
    const headers = { "Content-Type": "application/json", Authorization: `Bearer ${token}` };
    const answer = await fetch(path, { headers, ...options });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    return answer;
  }

  async function complete(signal) {
    const [model] = (await (await request("v1/models", { signal })).json()).data;
    const content = { model: model.id, prompt: byId("prompt").value, stream: true };
    for (const name of ["max_tokens", "temperature", "seed"]) {
      const { value } = byId(name);
      if (value !== "") content[name] = Number(value);
    }
    const body = JSON.stringify(content);
    const answer = await request("v1/completions", { method: "POST", body, signal });
    // Events say more of each token than this text; whoever leaves it cancels the request. Chromium
    // may count an answer as aborted whose body a reader took, to its end as well.
    await answer.text();
  }

  async function generate(event) {
    event.preventDefault();
    asks(new AbortController());
    const { signal } = own;
    try {
      await complete(signal);
    } catch (error) {
      // Another client's request, which is shown meanwhile, goes on.
      const state = document.body.dataset.state;
      const sentence = signal.aborted ? "Stopped." : `Refused: ${error.message}.`;
      if (state !== "running" || !signal.aborted) became(state === "running" ? state : "failed", sentence);
    } finally {
      asks(null);
    }
  }

  byId("ask").addEventListener("submit", generate);
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
  });
  byId("stop").addEventListener("click", () => {
    status.textContent = "Stopping after this step.";
    own?.abort();
  });
})();
