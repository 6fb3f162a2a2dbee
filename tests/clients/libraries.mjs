// What users of JavaScript libraries do first, against a server that runs.
//
//     node libraries.mjs URL NAME...
//
// It lies in a folder of its own packages.
import assert from "node:assert";

const SAID = "Hello from speq.";
const [url, ...names] = process.argv.slice(2);
const root = url.replace(/\/v1$/, "");
const asked = [{ role: "user", content: "hi" }];
const weather = {
  name: "weather",
  description: "The weather in a city.",
  parameters: {
    type: "object",
    properties: { city: { type: "string" } },
    required: ["city"],
    additionalProperties: false,
  },
};

const cells = {
  async openai_node() {
    const { default: OpenAI } = await import("openai");
    const { zodResponseFormat } = await import("openai/helpers/zod");
    const { z } = await import("zod");
    const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
    const chats = client.chat.completions;
    const whole = await chats.create({ model: "any", messages: asked });
    assert.equal(whole.choices[0].message.content, SAID);
    let text = "";
    for await (const chunk of await chats.create({ model: "any", messages: asked, stream: true })) {
      text += chunk.choices[0]?.delta?.content ?? "";
    }
    assert.equal(text, SAID);
    const form = zodResponseFormat(z.object({ name: z.string(), size: z.number().int() }), "city");
    const parsed = await chats.parse({ model: "any", messages: asked, response_format: form });
    assert.equal(typeof parsed.choices[0].message.parsed.size, "number");
    const run = chats.runTools({
      model: "any",
      messages: asked,
      tools: [
        {
          type: "function",
          function: { ...weather, parse: JSON.parse, function: (given) => `sunny in ${given.city}` },
        },
      ],
    });
    assert.match(await run.finalContent(), /sunny in Paris/);
    const response = await client.responses.create({ model: "any", input: "hi" });
    assert.equal(response.output_text, SAID);
    // A client that leaves in the midst of a stream.
    const left = await chats.create({ model: "any", messages: asked, stream: true });
    for await (const _ of left) {
      left.controller.abort();
      break;
    }
    assert.equal((await chats.create({ model: "any", messages: asked })).choices.length, 1);
  },

  async vercel_ai() {
    const { generateText, stepCountIs, streamText, tool, jsonSchema, Output } = await import("ai");
    const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
    const provider = createOpenAICompatible({
      name: "speq",
      baseURL: url,
      apiKey: "none",
      supportsStructuredOutputs: true,
    });
    const model = provider("any");
    assert.equal((await generateText({ model, prompt: "hi" })).text, SAID);
    assert.equal(await streamText({ model, prompt: "hi" }).text, SAID);
    const tools = {
      weather: tool({
        description: weather.description,
        inputSchema: jsonSchema(weather.parameters),
        execute: async ({ city }) => `sunny in ${city}`,
      }),
    };
    const told = await generateText({ model, prompt: "hi", tools, stopWhen: stepCountIs(3) });
    assert.match(told.text, /sunny in Paris/);
    const schema = jsonSchema({
      type: "object",
      properties: { size: { type: "integer" } },
      required: ["size"],
      additionalProperties: false,
    });
    const formed = await generateText({ model, prompt: "hi", output: Output.object({ schema }) });
    assert.equal(typeof formed.output.size, "number");
  },

  async ollama_node() {
    const { Ollama } = await import("ollama");
    const client = new Ollama({ host: root });
    const { models } = await client.list();
    const whole = await client.chat({ model: models[0].name, messages: asked });
    assert.equal(whole.message.content, SAID);
    let text = "";
    for await (const part of await client.chat({ model: "any", messages: asked, stream: true })) {
      text += part.message.content;
    }
    assert.equal(text, SAID);
    const tools = [{ type: "function", function: weather }];
    const called = await client.chat({ model: "any", messages: asked, tools });
    assert.deepEqual(called.message.tool_calls[0].function.arguments, { city: "Paris" });
    const written = await client.generate({ model: "any", prompt: "hi" });
    assert.equal(written.response, SAID);
  },
};

for (const name of names) {
  try {
    await cells[name]();
    console.log(`works ${name}`);
  } catch (error) {
    console.log(`fails ${name}: ${String(error).replaceAll("\n", " ").slice(0, 300)}`);
  }
}
process.exit(0);
