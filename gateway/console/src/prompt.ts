// "Where is this prompt cached?"

import { type Hits, type Prediction, type State, request } from "./api";
import { bar, byId, el, fill } from "./dom";
import { count, percent, plural, seconds, shortName } from "./format";

/** Most listed engines; those with the most cached tokens first. */
const LISTED = 100;
const TIERS: { kind: string; name: string; of: (hits: Hits) => number }[] = [
  { kind: "l1", name: "L1, the engine's own memory", of: (hits) => hits.l1_tokens },
  { kind: "l2", name: "L2, its host's memory", of: (hits) => hits.l2_tokens },
  { kind: "l3", name: "L3, the store", of: (hits) => hits.l3_tokens },
];

/** The request body for the pasted text: the text itself if it is a body; else one for `api` with it as prompt or messages. */
export function bodyOf(text: string, api: string, model: string): { body: string; interpretation: string } {
  let json: unknown = null;
  try {
    json = JSON.parse(text);
  } catch {
    // A prompt.
  }
  const named = (body: object): string => JSON.stringify(model === "" ? body : { model, ...body });
  if (Array.isArray(json) && json.every((item) => typeof item === "object" && item !== null && "role" in item)) {
    return { body: named({ messages: json }), interpretation: `as ${plural(json.length, "message")}` };
  }
  if (typeof json === "object" && json !== null && !Array.isArray(json)) {
    return { body: named(json), interpretation: "as the body of a request" };
  }
  if (api === "v1/chat/completions") {
    return { body: named({ messages: [{ role: "user", content: text }] }), interpretation: "as a user's message" };
  }
  return { body: named(api === "generate" ? { text } : { prompt: text }), interpretation: "as a prompt" };
}

export class Prompt {
  private readonly answer = byId("prompt-answer");

  constructor() {
    byId<HTMLFormElement>("prompt-form").addEventListener("submit", (event) => {
      event.preventDefault();
      void this.lookUp();
    });
  }

  show(state: State): void {
    const models = byId<HTMLSelectElement>("prompt-model");
    const chosen = models.value;
    fill(models, ...state.models.map((model) => el("option", { value: model }, model)));
    if (state.models.includes(chosen)) models.value = chosen;
  }

  private async lookUp(): Promise<void> {
    const value = (id: string): string => byId<HTMLInputElement>(id).value;
    const api = value("prompt-api");
    const { body, interpretation } = bodyOf(value("prompt-text"), api, value("prompt-model"));
    fill(this.answer, el("p", { class: "note" }, "Looking up …"));
    try {
      const found = await request<Prediction>(`debug/predict/${api}`, body);
      fill(this.answer, ...("message" in found ? unknown(found.message) : table(found, interpretation)));
    } catch (error) {
      fill(this.answer, el("p", { class: "notice bad" }, error instanceof Error ? error.message : String(error)));
    }
  }
}

function unknown(message: string): HTMLElement[] {
  return [el("p", { class: "notice" }, `No prediction: ${message}.`)];
}

function table(found: Exclude<Prediction, { message: string }>, interpretation: string): HTMLElement[] {
  const total = (hits: Hits): number => TIERS.reduce((sum, tier) => sum + tier.of(hits), 0);
  const engines = found.engines.filter((engine) => engine.role !== "decode" || total(engine) > 0);
  // Among engines with equal totals, those with hits in the faster tier first.
  engines.sort((a, b) => total(b) - total(a) || b.l1_tokens - a.l1_tokens || b.l2_tokens - a.l2_tokens);
  const withHits = engines.filter((engine) => total(engine) > 0).length;
  const tokens = found.input_tokens;
  const summary = `Interpreted ${interpretation}: ${count(tokens)} tokens. ${withHits === 0 ? "No engine has any of them cached" : `${withHits} of ${engines.length} prefill engines have some of them cached`} (looked up in ${seconds(found.took_ms / 1000)}).`;
  const rows = engines.slice(0, LISTED).map((engine) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, el("span", { class: "name", title: engine.instance }, shortName(engine.instance)), el("span", { class: "sub" }, engine.role)),
      ...TIERS.map((tier) => el("td", { "data-head": tier.kind.toUpperCase() }, count(tier.of(engine)))),
      el("td", { "data-head": "Of the prompt" }, bar(tokens, TIERS.map((tier) => ({ kind: tier.kind, size: tier.of(engine) }))), ` ${percent(total(engine), tokens)}`),
    ),
  );
  const heads = ["Engine", "L1", "L2", "L3", "Of the prompt"].map((head) => el("th", { scope: "col" }, head));
  const keys = TIERS.map((tier) => el("span", {}, el("span", { class: `swatch ${tier.kind}`, "aria-hidden": "true" }), ` ${tier.name}`));
  const cut = engines.length > LISTED ? [el("p", { class: "note" }, `${engines.length - LISTED} more engines are omitted.`)] : [];
  return [
    el("p", {}, summary),
    el("table", { class: "wide" }, el("caption", { class: "unseen" }, "Tokens of the prompt by engine and tier"), el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows)),
    ...cut,
    el("p", { class: "legend" }, ...keys),
  ];
}
