// The last decisions, and why one was made.

import { type Decision, type Explained, Unauthorized, ask } from "./api";
import { Keyed, byId, el, fill, setText } from "./dom";
import { clock, count, seconds, shortName } from "./format";

/** Candidates that are listed, the cheapest first; the chosen one is always among them. */
const LISTED = 25;
/** Terms in the order in which they come about. Those that are nought for all candidates are left out. */
const TERMS: [string, string][] = [
  ["wait", "queue"],
  ["fetch", "fetch from store"],
  ["service", "computing"],
  ["handover", "hand-over"],
  ["duplicate", "copies"],
  ["congestion", "those behind"],
  ["length", "length"],
  ["decode", "decode"],
];

const route = ({ entry, decode }: Decision): string => (decode === null ? shortName(entry) : `${shortName(entry)} → ${shortName(decode)}`);

export class Decisions {
  private readonly rows = new Keyed<Decision>(byId("decision-rows"), ({ request_id, at }) => `${request_id} ${at}`, row);
  private readonly detail = byId("decision");
  /** The gateway wanted a token before it told the reasons. */
  private locked = false;

  constructor() {
    addEventListener("hashchange", () => void this.open());
    void this.open();
  }

  show(decisions: Decision[]): void {
    this.rows.show(decisions);
    if (this.locked) void this.open();
    const none = "None yet, or none are kept (--kept-decisions).";
    const text = `A request's id opens the reasons. moongate explain shows the same, and what another policy would decide.`;
    setText(byId("decisions-note"), decisions.length === 0 ? none : text);
  }

  /** Shows the decision that the address names, so that it can be sent to somebody. */
  private async open(): Promise<void> {
    const id = /^#decision\/(.+)$/.exec(location.hash)?.[1];
    this.detail.hidden = id === undefined;
    this.locked = false;
    if (id === undefined) return;
    try {
      const { decisions } = await ask<{ decisions: Explained[] }>(`debug/decisions/${id}`);
      fill(this.detail, ...decisions.flatMap(explained), el("p", {}, el("a", { href: "#decisions" }, "Close")));
    } catch (error) {
      this.locked = error instanceof Unauthorized;
      fill(this.detail, el("p", { class: "notice bad" }, error instanceof Error ? error.message : String(error)));
    }
    this.detail.focus();
  }
}

function row(decision: Decision): { element: HTMLElement; update: () => void } {
  const { request_id, at, reason, input_tokens, held_s, predicted_ttft_s } = decision;
  const link = el("a", { href: `#decision/${encodeURIComponent(request_id)}`, class: "id" }, request_id.slice(0, 12));
  const cell = (head: string, text: string): HTMLElement => el("td", { "data-head": head }, text);
  const element = el(
    "tr",
    { "data-request": request_id },
    el("th", { scope: "row" }, link),
    cell("At", clock(at)),
    cell("Went to", route(decision)),
    cell("Because", reason),
    cell("Prompt tokens", count(input_tokens)),
    cell("Held", seconds(held_s)),
    cell("First token predicted", seconds(predicted_ttft_s)),
  );
  // A decision never changes.
  return { element, update: () => undefined };
}

function explained(decision: Explained): HTMLElement[] {
  const byCost = [...decision.candidates].sort((a, b) => a.cost - b.cost);
  const chosen = byCost.find((candidate) => candidate.instance === decision.entry);
  const listed = byCost.slice(0, LISTED);
  if (chosen !== undefined && !listed.includes(chosen)) listed.push(chosen);
  const terms = TERMS.filter(([term]) => byCost.some((candidate) => Math.abs(candidate.terms?.[term] ?? 0) > 1e-9));
  const heads = ["Engine", "Cost", ...terms.map(([, word]) => word), "Cached L1 / L2 / L3"];
  const priced = byCost.some((candidate) => candidate.terms !== null);
  const rows = listed.map((candidate) => {
    const mine = candidate === chosen;
    const { l1_tokens, l2_tokens, l3_tokens } = candidate.hits;
    return el(
      "tr",
      { class: mine ? "chosen" : null },
      el("th", { scope: "row" }, el("span", { class: "name", title: candidate.instance }, shortName(candidate.instance)), mine ? el("span", { class: "sub" }, "chosen") : null),
      el("td", { "data-head": "Cost" }, priced ? seconds(candidate.cost) : candidate.cost.toPrecision(3)),
      ...terms.map(([term, word]) => el("td", { "data-head": word }, seconds(candidate.terms?.[term]))),
      el("td", { "data-head": "Cached L1 / L2 / L3" }, `${count(l1_tokens)} / ${count(l2_tokens)} / ${count(l3_tokens)}`),
    );
  });
  const rest = byCost.length - listed.length;
  return [
    el("h3", {}, `Why ${route(decision)}`),
    el(
      "p",
      {},
      `${decision.reason}, says the policy ${decision.policy}. Request ${decision.request_id} came with ${count(decision.input_tokens)} prompt tokens, was held for ${seconds(decision.held_s)}, and its first token was predicted after ${seconds(decision.predicted_ttft_s)}.`,
    ),
    el(
      "table",
      { class: "wide" },
      el("caption", { class: "unseen" }, "Candidates with the parts of their cost"),
      el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, ...rows),
    ),
    el("p", { class: "note" }, rest > 0 ? `${rest} dearer candidates are left out.` : `These are all candidates.`),
  ];
}
