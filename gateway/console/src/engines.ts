// The table of engines.

import type { Instance, State } from "./api";
import { Keyed, bar, byId, el, fill, setText } from "./dom";
import { HEALTH, count, percent, seconds, shortName } from "./format";

/** Rows per page. */
const PAGE = 50;
const TROUBLE: Record<Instance["state"], number> = { unhealthy: 0, paused: 1, not_ready: 2, serving: 3 };

const busyness = ({ in_flight, load }: Instance): number =>
  in_flight + (load?.reported?.running ?? 0) + (load?.reported?.waiting ?? 0) + (load?.wait_s ?? 0);
const hitRate = ({ prompts }: Instance): number =>
  prompts !== null && prompts.tokens > 0 ? prompts.cached_tokens / prompts.tokens : -1;

const ORDERS: Record<string, (a: Instance, b: Instance) => number> = {
  trouble: (a, b) => TROUBLE[a.state] - TROUBLE[b.state],
  busy: (a, b) => busyness(b) - busyness(a),
  hits: (a, b) => hitRate(b) - hitRate(a),
  name: () => 0,
};

export class Engines {
  private readonly rows = new Keyed<Instance>(byId("engine-rows"), (instance) => instance.id, row);
  private readonly filter = byId<HTMLInputElement>("engine-filter");
  private readonly order = byId<HTMLSelectElement>("engine-order");
  private readonly more = byId<HTMLButtonElement>("engine-more");
  private shown = PAGE;
  private instances: Instance[] = [];

  constructor() {
    const reset = (): void => {
      this.shown = PAGE;
      this.draw();
    };
    this.filter.addEventListener("input", reset);
    this.order.addEventListener("change", reset);
    this.more.addEventListener("click", () => {
      this.shown += PAGE;
      this.draw();
    });
  }

  show(state: State): void {
    this.instances = state.instances;
    this.draw();
  }

  private draw(): void {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter((word) => word !== "");
    const found = this.instances.filter((instance) => {
      const text = searchable(instance);
      return words.every((word) => text.includes(word));
    });
    const order = ORDERS[this.order.value] ?? (() => 0);
    found.sort((a, b) => order(a, b) || a.role.localeCompare(b.role) || a.id.localeCompare(b.id));
    this.rows.show(found.slice(0, this.shown));
    const hidden = Math.max(0, found.length - this.shown);
    this.more.hidden = hidden === 0;
    setText(this.more, `Show ${Math.min(PAGE, hidden)} more of ${hidden}`);
    const all = this.instances.length;
    setText(byId("engine-count"), found.length === all ? `${all} total` : `${found.length} of ${all}`);
  }
}

function searchable(instance: Instance): string {
  const { id, url, role, state, version, engine, models, place, workload, reason } = instance;
  const parts = [id, url, role, HEALTH[state].word, version, engine, reason, ...models, ...Object.values(place), ...Object.values(workload)];
  return parts.join(" ").toLowerCase();
}

/** Known levels of a location, the nearest first: host, rack, zone. */
export function placeText({ node, rack, zone, nvlink_domain }: Instance["place"]): string {
  const named = [nvlink_domain && `NVLink ${nvlink_domain}`, node, rack, zone];
  return named.filter((level) => level !== null && level !== "").join(" · ") || "unknown";
}

export function healthSign(instance: Instance): HTMLElement {
  const { sign, word, means } = HEALTH[instance.state];
  return el("span", { class: `health ${instance.state}`, title: means }, el("span", { "aria-hidden": "true" }, sign), ` ${word}`);
}

function row(first: Instance): { element: HTMLElement; update: (instance: Instance) => void } {
  const cell = (head: string): HTMLElement => el("td", { "data-head": head });
  const [state, flight, queue] = [cell("State"), cell("In flight"), cell("Queue")];
  const [cache, hits, place] = [cell("KV cache in use"), cell("Hit rate"), cell("Location")];
  const name = el("th", { scope: "row" });
  const element = el("tr", { "data-engine": first.id }, name, state, flight, queue, cache, hits, place);
  const update = (instance: Instance): void => {
    const about = [instance.role, instance.engine, instance.version].filter((part) => part !== null && part !== "");
    fill(name, el("span", { class: "name", title: instance.id }, shortName(instance.id)), el("span", { class: "sub" }, about.join(" · ")));
    fill(state, healthSign(instance), instance.reason && el("span", { class: "sub" }, instance.reason));
    setText(flight, String(instance.in_flight));
    fill(queue, ...queueOf(instance));
    fill(cache, ...cacheOf(instance));
    const { tokens, cached_tokens } = instance.prompts ?? { tokens: 0, cached_tokens: 0 };
    if (instance.role === "decode") setText(hits, "computes no prompts");
    else if (tokens === 0) setText(hits, "–");
    else fill(hits, bar(tokens, [{ kind: "hit", size: cached_tokens }]), ` ${percent(cached_tokens, tokens)}`, el("span", { class: "sub" }, `of ${count(tokens)} tokens`));
    setText(place, placeText(instance.place));
  };
  return { element, update };
}

function queueOf({ role, load }: Instance): (Node | string)[] {
  if (load === null) return ["–"];
  const reported = load.reported === null ? "not reported" : `${load.reported.waiting} waiting, ${load.reported.running} running`;
  if (role === "decode") return [reported];
  return [`${load.waiting_prompts} prompts, ${seconds(load.wait_s)}`, el("span", { class: "sub" }, `engine: ${reported}`)];
}

function cacheOf({ load }: Instance): (Node | string)[] {
  const reported = load?.reported;
  if (reported === null || reported === undefined || reported.capacity_tokens === 0) return ["not reported"];
  const { used_tokens: used, capacity_tokens: capacity } = reported;
  return [bar(capacity, [{ kind: "use", size: used }]), ` ${percent(used, capacity)}`, el("span", { class: "sub" }, `of ${count(capacity)} tokens`)];
}
