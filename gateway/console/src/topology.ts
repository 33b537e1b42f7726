// The map: stores, prefills, decodes and plain workers in columns, with the links between them.

import type { Decision, Instance, Place, Role, State } from "./api";
import { byId, el, fill, setText, svg } from "./dom";
import { HEALTH, engineOf, plural, shortName } from "./format";

/** Most boxes in a column; above it, engines are grouped by location. */
const MAX_BOXES = 12;
/** From near to far, as the scheduler weights them. */
const DISTANCES = ["NVLink", "same node", "same rack", "same zone", "other zone", "unknown"] as const;
type Distance = (typeof DISTANCES)[number];
type Level = "engine" | "node" | "rack" | "zone" | "all";

interface Box {
  key: string;
  name: string;
  sub: string;
  role: Role | "store";
  place: Place;
  members: Instance[];
  trouble: string | null;
  /** No engine in it is usable. */
  useless: boolean;
}

interface Link {
  from: Box;
  to: Box;
  distance: Distance | "fetch";
  recent: number;
}

const NOWHERE: Place = { zone: null, rack: null, node: null, nvlink_domain: null };
const TITLES: Record<Box["role"], string> = { store: "KV store", prefill: "Prefill", decode: "Decode", plain: "Plain workers" };

/** The nearest location level that both share. */
export function distance(a: Place, b: Place): Distance {
  const same = (level: keyof Place): boolean => a[level] !== null && a[level] === b[level];
  if (same("nvlink_domain")) return "NVLink";
  if (same("node")) return "same node";
  if (same("rack")) return "same rack";
  if (same("zone")) return "same zone";
  return a.zone !== null && b.zone !== null ? "other zone" : "unknown";
}

/** The location reduced to `level` and coarser levels. */
function locationAt(place: Place, level: Level): Place {
  const { zone, rack, node } = place;
  switch (level) {
    case "engine": return place;
    case "node": return { ...NOWHERE, zone, rack, node };
    case "rack": return { ...NOWHERE, zone, rack };
    case "zone": return { ...NOWHERE, zone };
    case "all": return NOWHERE;
  }
}

function boxes(instances: Instance[], role: Role): { level: Level; boxes: Box[] } {
  const mine = instances.filter((instance) => instance.role === role);
  for (const level of ["engine", "node", "rack", "zone", "all"] as const) {
    const groups = new Map<string, Instance[]>();
    for (const instance of mine) {
      const key = level === "engine" ? instance.id : JSON.stringify(locationAt(instance.place, level));
      const group = groups.get(key);
      if (group === undefined) groups.set(key, [instance]);
      else group.push(instance);
    }
    if (groups.size <= MAX_BOXES || level === "all") {
      return { level, boxes: [...groups].map(([key, members]) => box(role, level, key, members)) };
    }
  }
  return { level: "all", boxes: [] };
}

function box(role: Role, level: Level, key: string, members: Instance[]): Box {
  const [first] = members as [Instance, ...Instance[]];
  const place = locationAt(first.place, level);
  const flight = members.reduce((sum, instance) => sum + instance.in_flight, 0);
  const notServing = members.filter((instance) => instance.state !== "serving");
  const isSingle = level === "engine";
  const where = { engine: "", node: place.node, rack: place.rack, zone: place.zone, all: null }[level];
  const trouble = notServing.length === 0 ? null : isSingle ? HEALTH[first.state].word : `${notServing.length} not serving`;
  return {
    key: `${role} ${key}`,
    name: isSingle ? shortName(first.id) : `${members.length} ${role}${where === null ? "" : ` · ${where}`}`,
    sub: `${flight} in flight`,
    role,
    place,
    members,
    trouble,
    useless: notServing.length === members.length,
  };
}

function stores(state: State): Box[] {
  const nodes = state.store?.nodes ?? [];
  const make = (key: string, name: string, lost: number, sub: string): Box => ({
    key: `store ${key}`, name, sub, role: "store", place: NOWHERE, members: [], trouble: lost > 0 ? `${lost} lost` : null, useless: lost > 0,
  });
  if (nodes.length <= MAX_BOXES) return nodes.map(({ endpoint, up }) => make(endpoint, endpoint, up ? 0 : 1, "store node"));
  const lost = nodes.filter((node) => !node.up).length;
  return [make("all", `${nodes.length} store nodes`, lost, "")];
}

/** Two engines can form a pair if they share one of these keys. */
function pairingKeys(box: Box): Set<string> {
  return new Set(box.members.flatMap(({ handover, models }) => (handover === null ? [] : models.map((model) => `${handover} ${model}`))));
}

function links(columns: Map<Box["role"], Box[]>, decisions: Decision[]): Link[] {
  const boxOf = new Map<string, Box>();
  for (const box of [...columns.values()].flat()) for (const member of box.members) boxOf.set(`${box.role} ${member.id}`, box);
  const recentCounts = new Map<string, number>();
  for (const { prefill, decode } of decisions) {
    const key = `${boxOf.get(`prefill ${engineOf(prefill)}`)?.key} > ${boxOf.get(`decode ${engineOf(decode ?? "")}`)?.key}`;
    recentCounts.set(key, (recentCounts.get(key) ?? 0) + 1);
  }
  const found: Link[] = [];
  const decodes = (columns.get("decode") ?? []).map((to) => ({ to, keys: pairingKeys(to) }));
  for (const from of columns.get("prefill") ?? []) {
    const ownKeys = [...pairingKeys(from)];
    for (const { to, keys } of decodes) {
      if (!ownKeys.some((key) => keys.has(key))) continue;
      found.push({ from, to, distance: distance(from.place, to.place), recent: recentCounts.get(`${from.key} > ${to.key}`) ?? 0 });
    }
  }
  for (const from of columns.get("store") ?? []) {
    if (from.useless) continue;
    for (const to of [...(columns.get("prefill") ?? []), ...(columns.get("plain") ?? [])]) {
      if (to.members.some((member) => member.uses_store)) found.push({ from, to, distance: "fetch", recent: 0 });
    }
  }
  return found;
}

export class Topology {
  private readonly map = byId("map");
  private readonly lines = svg("svg", { class: "lines", "aria-hidden": "true" });
  private readonly columns = el("div", { class: "columns" });
  private found: Link[] = [];

  constructor() {
    this.map.append(this.lines, this.columns);
    new ResizeObserver(() => this.draw()).observe(this.map);
  }

  show(state: State, decisions: Decision[]): void {
    const columns = new Map<Box["role"], Box[]>();
    const together: string[] = [];
    const put = (role: Box["role"], boxes: Box[]): void => {
      if (boxes.length > 0) columns.set(role, boxes);
    };
    put("store", stores(state));
    for (const role of ["prefill", "decode", "plain"] as const) {
      const { level, boxes: found } = boxes(state.instances, role);
      put(role, found);
      if (level !== "engine") together.push(role);
    }
    this.found = links(columns, decisions);
    fill(this.columns, ...[...columns].map(([role, boxes]) => column(role, boxes)));
    this.map.hidden = columns.size === 0;
    setText(byId("topology-note"), note(state, this.found, together));
    fill(byId("legend"), ...legend(this.found));
    this.draw();
  }

  /** Draws lines between the boxes at their positions in the layout. */
  private draw(): void {
    const frame = this.map.getBoundingClientRect();
    const placed = new Map<string, DOMRect>();
    for (const box of this.columns.querySelectorAll<HTMLElement>("[data-box]")) {
      placed.set(box.dataset["box"] ?? "", box.getBoundingClientRect());
    }
    const busiest = Math.max(1, ...this.found.map((link) => link.recent));
    this.lines.replaceChildren();
    for (const { from, to, distance, recent } of this.found) {
      const [a, b] = [placed.get(from.key), placed.get(to.key)];
      if (a === undefined || b === undefined) continue;
      const [x1, y1] = [a.right - frame.left, (a.top + a.bottom) / 2 - frame.top];
      const [x2, y2] = [b.left - frame.left, (b.top + b.bottom) / 2 - frame.top];
      const middle = (x1 + x2) / 2;
      const path = svg("path", { d: `M${x1},${y1} C${middle},${y1} ${middle},${y2} ${x2},${y2}`, class: `link ${kind(distance)}` });
      path.style.strokeWidth = `${1 + (4 * recent) / busiest}px`;
      this.lines.append(path);
    }
  }
}

const kind = (distance: Link["distance"]): string => distance.toLowerCase().replace(" ", "-");

function column(role: Box["role"], boxes: Box[]): HTMLElement {
  const items = boxes.map((box) =>
    el(
      "li",
      { class: `box ${role}${box.useless ? " useless" : box.trouble === null ? "" : " trouble"}`, "data-box": box.key, title: box.members.length === 1 ? (box.members[0]?.id ?? null) : null },
      el("span", { class: "name" }, box.name),
      el("span", { class: "sub" }, box.trouble === null ? box.sub : `${box.trouble} · ${box.sub}`),
    ),
  );
  return el("div", { class: "column" }, el("h3", {}, TITLES[role]), el("ul", {}, ...items));
}

function note(state: State, found: Link[], together: string[]): string {
  if (state.instances.length === 0) {
    return "No engines yet. Engines come from flags such as --prefill and --worker, from --instances-file, from --discovery, or register themselves.";
  }
  const pairs = found.filter((link) => link.distance !== "fetch");
  const recent = pairs.reduce((sum, link) => sum + link.recent, 0);
  const parts = [plural(state.instances.length, "engine")];
  if (pairs.length > 0) parts.push(`${plural(pairs.length, "link")} between prefill and decode, ${recent} of the latest decisions on them`);
  if (state.store !== null) parts.push(plural(state.store.nodes.filter((node) => node.up).length, "store node"));
  if (together.length > 0) parts.push(`${together.join(" and ")} engines are grouped by location`);
  return `${parts.join("; ")}.`;
}

function legend(found: Link[]): HTMLElement[] {
  const kinds = [...DISTANCES, "fetch" as const].map((distance) => ({
    distance,
    links: found.filter((link) => link.distance === distance).length,
  }));
  return kinds
    .filter(({ links }) => links > 0)
    .map(({ distance, links }) =>
      el(
        "span",
        {},
        svg("svg", { viewBox: "0 0 32 8", class: "key", "aria-hidden": "true" }, svg("path", { d: "M0,4 H32", class: `link ${kind(distance)}` })),
        distance === "fetch" ? ` ${links} from the store` : ` ${links} ${distance === "unknown" ? "of unknown distance" : distance}`,
      ),
    );
}
