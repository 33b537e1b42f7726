// The latest decisions, and the explanation of one.

import { type Decision, type Explained, Unauthorized, request } from "./api";
import { Keyed, byId, el, fill, setText } from "./dom";
import { clock, count, seconds, shortName } from "./format";

/** Most listed candidates, the cheapest first; the chosen one is always included. */
const LISTED = 25;
/** Cost terms in order of occurrence. Terms that are 0 for all candidates are omitted. */
const TERMS: [string, string][] = [
  ["wait", "queue"],
  ["fetch", "fetch from store"],
  ["service", "computation"],
  ["handover", "hand-over"],
  ["duplicate", "duplicate"],
  ["congestion", "congestion"],
  ["length", "length"],
  ["decode", "decode"],
];

const route = ({ prefill, decode }: Decision): string => (decode === null ? shortName(prefill) : `${shortName(prefill)} → ${shortName(decode)}`);

export class Decisions {
  private readonly rows = new Keyed<Decision>(byId("decision-rows"), ({ request_id, at }) => `${request_id} ${at}`, row);
  private readonly detail = byId("decision");
  /** The gateway required a token for the explanation. */
  private locked = false;

  constructor() {
    addEventListener("hashchange", () => void this.open());
    void this.open();
  }

  show(decisions: Decision[]): void {
    this.rows.show(decisions);
    if (this.locked) void this.open();
    const none = "No decisions yet, or recording is off (--decision-history).";
    const text = `Select a request id for its explanation. moongate explain shows the same, and replays it with another policy.`;
    setText(byId("decisions-note"), decisions.length === 0 ? none : text);
  }

  /** Shows the decision in the page's address, so that a link to it can be shared. */
  private async open(): Promise<void> {
    const id = /^#decision\/(.+)$/.exec(location.hash)?.[1];
    this.detail.hidden = id === undefined;
    this.locked = false;
    if (id === undefined) return;
    try {
      const { decisions } = await request<{ decisions: Explained[] }>(`debug/decisions/${id}`);
      fill(this.detail, ...decisions.flatMap(explained), el("p", {}, el("a", { href: "#decisions" }, "Close")));
    } catch (error) {
      this.locked = error instanceof Unauthorized;
      fill(this.detail, el("p", { class: "notice bad" }, error instanceof Error ? error.message : String(error)));
    }
    this.detail.focus();
  }
}

function row(decision: Decision): { element: HTMLElement; update: () => void } {
  const { request_id, at, reason, input_tokens, queue_wait_s, predicted_ttft_s } = decision;
  const link = el("a", { href: `#decision/${encodeURIComponent(request_id)}`, class: "id" }, request_id.slice(0, 12));
  const cell = (head: string, text: string): HTMLElement => el("td", { "data-head": head }, text);
  const element = el(
    "tr",
    { "data-request": request_id },
    el("th", { scope: "row" }, link),
    cell("At", clock(at)),
    cell("Route", route(decision)),
    cell("Reason", reason),
    cell("Prompt tokens", count(input_tokens)),
    cell("Queued", seconds(queue_wait_s)),
    cell("Predicted TTFT", seconds(predicted_ttft_s)),
  );
  // Decisions are immutable.
  return { element, update: () => undefined };
}

function explained(decision: Explained): HTMLElement[] {
  const byCost = [...decision.candidates].sort((a, b) => a.cost - b.cost);
  const chosen = byCost.find((candidate) => candidate.instance === decision.prefill);
  const listed = byCost.slice(0, LISTED);
  if (chosen !== undefined && !listed.includes(chosen)) listed.push(chosen);
  const terms = TERMS.filter(([term]) => byCost.some((candidate) => Math.abs(candidate.terms?.[term] ?? 0) > 1e-9));
  const heads = ["Engine", "Cost", ...terms.map(([, word]) => word), "Cached L1 / L2 / L3"];
  const priced = byCost.some((candidate) => candidate.terms !== null);
  const rows = listed.map((candidate) => {
    const isChosen = candidate === chosen;
    const { l1_tokens, l2_tokens, l3_tokens } = candidate.hits;
    return el(
      "tr",
      { class: isChosen ? "chosen" : null },
      el("th", { scope: "row" }, el("span", { class: "name", title: candidate.instance }, shortName(candidate.instance)), isChosen ? el("span", { class: "sub" }, "chosen") : null),
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
      `Policy ${decision.policy}: ${decision.reason}. Request ${decision.request_id}: ${count(decision.input_tokens)} prompt tokens, queued for ${seconds(decision.queue_wait_s)}, predicted TTFT ${seconds(decision.predicted_ttft_s)}.`,
    ),
    el(
      "table",
      { class: "wide" },
      el("caption", { class: "unseen" }, "Candidates with the terms of their cost"),
      el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, ...rows),
    ),
    el("p", { class: "note" }, rest > 0 ? `${rest} more expensive candidates are omitted.` : `All candidates are shown.`),
  ];
}
