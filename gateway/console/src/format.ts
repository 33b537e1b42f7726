// Formats numbers and names.

import type { Health } from "./api";

export function count(value: number): string {
  const steps: [number, string][] = [[1e9, "G"], [1e6, "M"], [1e4, "k"]];
  for (const [size, suffix] of steps) {
    if (value >= size) {
      const unit = suffix === "k" ? 1e3 : size;
      return `${(value / unit).toPrecision(3)} ${suffix}`;
    }
  }
  return String(Math.round(value));
}

export function plural(number: number, word: string): string {
  return `${number} ${word}${number === 1 ? "" : "s"}`;
}

export function bytes(value: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? value : value.toPrecision(3)} ${units[unit]}`;
}

export function rate(value: number | null): string {
  if (value === null) return "–";
  return value >= 100 ? count(value) : value.toFixed(value >= 10 ? 0 : 1);
}

export function percent(part: number, whole: number): string {
  return whole > 0 ? `${Math.round((100 * part) / whole)}\u00a0%` : "–";
}

export function seconds(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) < 0.0005) return "0 s";
  if (Math.abs(value) < 1) return `${(value * 1000).toPrecision(value < 0.01 ? 2 : 3)} ms`;
  return `${value.toPrecision(3)} s`;
}

export function duration(value: number): string {
  if (value < 120) return `${Math.floor(value)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min`;
  if (value < 172800) return `${Math.floor(value / 3600)} h`;
  return `${Math.floor(value / 86400)} d`;
}

export function clock(unixSeconds: number): string {
  return new Date(unixSeconds * 1000).toLocaleTimeString([], { hour12: false });
}

/** The end of the name of one of several data-parallel ranks: `ENGINE#1`. */
const RANK = /#\d+$/;

/** An engine's name without the URL scheme, or without a pod's namespace and UID. */
export function shortName(id: string): string {
  const pod = /^[^/]+\/([^@/]+)@/.exec(id)?.[1];
  return pod === undefined ? id.replace(/^https?:\/\//, "") : pod + (RANK.exec(id)?.[0] ?? "");
}

/** The id of the engine that a data-parallel rank belongs to; decisions name ranks. */
export const engineOf = (name: string): string => name.replace(RANK, "");

/** A word and a sign for each state, because colour alone is not accessible. */
export const HEALTH: Record<Health, { sign: string; word: string; means: string }> = {
  serving: { sign: "●", word: "serving", means: "requests are sent there" },
  not_ready: { sign: "○", word: "not ready", means: "no requests are sent there" },
  unhealthy: { sign: "✕", word: "unhealthy", means: "its health checks fail" },
  paused: { sign: "◐", word: "paused", means: "its circuit breaker is open or it is suspect; it is tried again soon" },
};
