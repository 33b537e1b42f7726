// The page: polls the gateway and passes the responses to the sections.

import { type Decision, type State, Unauthorized, hasToken, request, setToken } from "./api";
import { Decisions } from "./decisions";
import { byId, el, fill, setText } from "./dom";
import { Engines } from "./engines";
import { bytes, clock, count, duration, percent, rate, seconds } from "./format";
import { Prompt } from "./prompt";
import { History, sparkline } from "./rates";
import { showRollout } from "./rollout";
import { Topology } from "./topology";

/** The schema version of /debug/fleet that this page supports. */
const SCHEMA_VERSION = 2;
const POLL_INTERVAL_MS = 2000;

const history = new History();
const status = byId("status");
let lastAt: number | null = null;
let timer = 0;

function setStatus(kind: string, text: string): void {
  status.className = `status ${kind}`;
  setText(status, text);
}

/** Shows the token form. */
function showTokenForm(): void {
  byId("token-form").hidden = false;
  byId("token-refused").hidden = !hasToken();
  byId("content").hidden = true;
  setStatus("locked", "The gateway requires a token");
}

/** Keeps the last data visible, greyed out. */
function showUnreachable(error: unknown): void {
  const since = lastAt === null ? "" : ` Showing data from ${clock(lastAt)}.`;
  const reason = error instanceof Error ? error.message : String(error);
  setStatus("bad", `The gateway does not respond (${reason}).${since} Retrying …`);
  byId("content").classList.add("stale");
}

const sections = { topology: new Topology(), engines: new Engines(), prompt: new Prompt(), decisions: new Decisions() };

function show(state: State, decisions: Decision[]): void {
  lastAt = state.now;
  history.add(state);
  byId("token-form").hidden = true;
  const content = byId("content");
  content.hidden = false;
  content.classList.remove("stale");
  showStatus(state);
  fill(byId("tiles"), ...tiles(state));
  sections.topology.show(state, decisions);
  sections.engines.show(state);
  sections.prompt.show(state);
  sections.decisions.show(decisions);
  showRollout(state);
}

function showStatus(state: State): void {
  const { release, policy, uptime_s, ready, draining } = state.gateway;
  const known = state.instances.length;
  const serving = state.instances.filter((instance) => instance.state === "serving").length;
  if (state.schema_version !== SCHEMA_VERSION) setStatus("warn", "This page does not match the gateway's release; please reload it");
  else if (draining) setStatus("warn", "Shutting down: waiting for open requests");
  else if (ready) setStatus("good", serving === known ? "Serving" : `Serving, without ${known - serving} of ${known} engines`);
  else if (known === 0) setStatus("warn", "No engines yet");
  else setStatus("bad", "Cannot serve: no plain worker and no prefill/decode pair is usable");
  setText(byId("about"), `${release} · policy ${policy} · up ${duration(uptime_s)}`);
}

function tiles(state: State): HTMLElement[] {
  const recent = history.recent();
  const { in_flight } = state.totals;
  const known = state.instances.length;
  const serving = state.instances.filter((instance) => instance.state === "serving").length;
  const over = recent.over_s > 0 ? `last ${duration(Math.round(recent.over_s))}` : "no data yet";
  const failed = recent.failed > 0 ? `${recent.failed} failed, ` : "";
  return [
    tile("Engines", `${serving} / ${known}`, "serving"),
    tile("Requests", `${rate(recent.requests_per_s)} /s`, `${failed}${over}`, history.requests()),
    tile("In flight", count(in_flight), `${count(state.gateway.queued)} queued`, history.queued()),
    tile("First token", seconds(recent.first_token_s), `mean of streams, ${over}`),
    tile("Cache hits", recent.hit_rate === null ? "–" : percent(recent.hit_rate, 1), `of prompt tokens, ${over}`),
    tile("Generated", `${rate(recent.tokens_per_s)} /s`, `tokens, ${over}`),
    tile("Index", count(state.index.blocks), `blocks, ${bytes(state.index.bytes)}`),
  ];
}

function tile(name: string, value: string, about: string, line: number[] = []): HTMLElement {
  const spark = line.length > 1 ? sparkline(line) : null;
  return el("div", { class: "tile" }, el("dt", {}, name), el("dd", {}, el("span", { class: "value" }, value), el("span", { class: "sub" }, about), spark));
}

async function poll(): Promise<void> {
  clearTimeout(timer);
  try {
    const [state, { decisions }] = await Promise.all([
      request<State>("debug/fleet"),
      request<{ decisions: Decision[] }>("debug/decisions"),
    ]);
    show(state, decisions);
  } catch (error) {
    if (error instanceof Unauthorized) showTokenForm();
    else showUnreachable(error);
  }
  // A hidden page does not poll.
  if (!document.hidden) timer = window.setTimeout(() => void poll(), POLL_INTERVAL_MS);
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) void poll();
});
byId<HTMLFormElement>("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setToken(byId<HTMLInputElement>("token").value);
  void poll();
});
void poll();
