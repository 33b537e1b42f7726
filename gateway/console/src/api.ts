// Responses of the gateway. docs/console.md describes /debug/fleet, docs/openapi.yaml the others.

export type Role = "prefill" | "decode" | "plain";
export type Health = "serving" | "not_ready" | "unhealthy" | "paused";

export interface Place {
  zone: string | null;
  rack: string | null;
  node: string | null;
  nvlink_domain: string | null;
}

export interface Instance {
  id: string;
  url: string;
  role: Role;
  source: string;
  place: Place;
  workload: { group: string | null; role: string | null; revision: string | null; image: string | null };
  state: Health;
  reason: string | null;
  engine: string | null;
  version: string | null;
  models: string[];
  handover: string | null;
  uses_store: boolean;
  in_flight: number;
  prompts: { completed: number; tokens: number; cached_tokens: number } | null;
  load: {
    waiting_prompts: number;
    waiting_tokens: number;
    wait_s: number;
    decode_tokens: number;
    reported: { running: number; waiting: number; used_tokens: number; capacity_tokens: number } | null;
  } | null;
}

export interface Totals {
  in_flight: number;
  ended: number;
  failed: number;
  first_tokens: number;
  first_token_s: number;
  prompt_tokens: number;
  cached_tokens: number;
  completion_tokens: number;
}

export interface State {
  schema_version: number;
  now: number;
  gateway: {
    release: string;
    policy: string;
    uptime_s: number;
    ready: boolean;
    draining: boolean;
    generation: number;
    queued: number;
  };
  totals: Totals;
  index: { blocks: number; bytes: number };
  models: string[];
  store: { nodes: { endpoint: string; up: boolean }[]; events_in_sync: boolean } | null;
  instances: Instance[];
}

/** One element of /debug/decisions. */
export interface Decision {
  request_id: string;
  at: number;
  queue_wait_s: number;
  policy: string;
  reason: string;
  prefill: string;
  decode: string | null;
  predicted_ttft_s: number | null;
  input_tokens: number;
}

export interface Hits {
  l1_tokens: number;
  l2_tokens: number;
  l3_tokens: number;
}

/** One element of /debug/decisions/ID. */
export interface Explained extends Decision {
  candidates: {
    instance: string;
    cost: number;
    leading_term: string;
    terms: Record<string, number> | null;
    hits: Hits;
  }[];
}

/** /debug/predict: the predicted hits of each engine, or why there is no prediction. */
export type Prediction =
  | { input_tokens: number; took_ms: number; engines: ({ instance: string; role: Role } & Hits)[] }
  | { reason: string; message: string };

/** The gateway requires a token, or rejected the current one. */
export class Unauthorized extends Error {
  override message = "the gateway requires its admin token";
}

const TOKEN = "moongate-admin-token";
/** Requests that take longer count as failed. */
const REQUEST_TIMEOUT_MS = 5000;

export function hasToken(): boolean {
  return sessionStorage.getItem(TOKEN) !== null;
}

/** Stores the token until the tab is closed. */
export function setToken(token: string): void {
  sessionStorage.setItem(TOKEN, token);
}

/** Sends a request to the gateway. Paths are relative to the page, so that it also works behind a proxy with a prefix. */
export async function request<T>(path: string, body?: string): Promise<T> {
  const headers: Record<string, string> = {};
  const token = sessionStorage.getItem(TOKEN);
  if (token !== null) headers["authorization"] = `Bearer ${token}`;
  const init: RequestInit = { headers, signal: AbortSignal.timeout(REQUEST_TIMEOUT_MS) };
  if (body !== undefined) {
    headers["content-type"] = "application/json";
    init.method = "POST";
    init.body = body;
  }
  const response = await fetch(path, init);
  if (response.status === 401 || response.status === 403) throw new Unauthorized();
  if (!response.ok) throw new Error(await errorText(response));
  return (await response.json()) as T;
}

async function errorText(response: Response): Promise<string> {
  const text = await response.text();
  try {
    const message: unknown = JSON.parse(text)?.error?.message;
    if (typeof message === "string") return message;
  } catch {
    // Not an error of the gateway: a proxy responded.
  }
  return `${response.status} ${response.statusText}`;
}
