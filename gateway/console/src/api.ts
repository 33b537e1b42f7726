// What the gateway answers. docs/console.md describes /debug/fleet, docs/metrics.md and `moongate explain` the rest.

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
  prompts: { answered: number; tokens: number; cached_tokens: number } | null;
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
  form: number;
  now: number;
  gateway: {
    release: string;
    policy: string;
    uptime_s: number;
    ready: boolean;
    draining: boolean;
    generation: number;
    held: number;
  };
  totals: Totals;
  index: { pages: number; bytes: number };
  models: string[];
  store: { nodes: { endpoint: string; up: boolean }[]; events_current: boolean } | null;
  instances: Instance[];
}

/** A line of /debug/decisions. */
export interface Decision {
  request_id: string;
  at: number;
  held_s: number;
  policy: string;
  reason: string;
  entry: string;
  decode: string | null;
  predicted_ttft_s: number | null;
  input_tokens: number;
}

export interface Hits {
  l1_tokens: number;
  l2_tokens: number;
  l3_tokens: number;
}

/** An element of /debug/decisions/ID. */
export interface Explained extends Decision {
  candidates: {
    instance: string;
    cost: number;
    leading_term: string;
    terms: Record<string, number> | null;
    hits: Hits;
  }[];
}

/** /debug/predict: what each engine has, or why that is not known. */
export type Prediction =
  | { input_tokens: number; took_ms: number; engines: ({ instance: string; role: Role } & Hits)[] }
  | { reason: string; why: string };

/** The gateway wants a token, or another one. */
export class Unauthorized extends Error {
  override message = "the gateway asks for its admin token";
}

const TOKEN = "moongate-admin-token";
/** A gateway that takes longer counts as one that does not answer. */
const PATIENCE_MS = 5000;

export function hasToken(): boolean {
  return sessionStorage.getItem(TOKEN) !== null;
}

/** Keeps the token until the tab is closed. */
export function setToken(token: string): void {
  sessionStorage.setItem(TOKEN, token);
}

/** Asks the gateway. Paths are relative to the page, so that it also works behind a proxy with a prefix. */
export async function ask<T>(path: string, body?: string): Promise<T> {
  const headers: Record<string, string> = {};
  const token = sessionStorage.getItem(TOKEN);
  if (token !== null) headers["authorization"] = `Bearer ${token}`;
  const request: RequestInit = { headers, signal: AbortSignal.timeout(PATIENCE_MS) };
  if (body !== undefined) {
    headers["content-type"] = "application/json";
    request.method = "POST";
    request.body = body;
  }
  const response = await fetch(path, request);
  if (response.status === 401 || response.status === 403) throw new Unauthorized();
  if (!response.ok) throw new Error(await errorText(response));
  return (await response.json()) as T;
}

async function errorText(response: Response): Promise<string> {
  const text = await response.text();
  try {
    const told: unknown = JSON.parse(text)?.error?.message;
    if (typeof told === "string") return told;
  } catch {
    // Not the gateway's own form: somebody between.
  }
  return `${response.status} ${response.statusText}`;
}
