// Computes rates of the last minute and sparklines of the last minutes from running totals.

import type { State, Totals } from "./api";
import { svg } from "./dom";

const HISTORY_S = 180;
const WINDOW_S = 60;

interface Sample {
  at: number;
  totals: Totals;
  queued: number;
}

/** Rates within the window; `null` if there were no events to divide by. */
export interface Recent {
  requests_per_s: number | null;
  failed: number;
  tokens_per_s: number | null;
  first_token_s: number | null;
  hit_rate: number | null;
  over_s: number;
}

export class History {
  private samples: Sample[] = [];

  add(state: State): void {
    const last = this.samples.at(-1);
    // The totals restart from 0 when the gateway restarts.
    if (last !== undefined && state.totals.ended < last.totals.ended) this.samples = [];
    if (last?.at === state.now) return;
    this.samples.push({ at: state.now, totals: state.totals, queued: state.gateway.queued });
    while ((this.samples[0]?.at ?? state.now) < state.now - HISTORY_S) this.samples.shift();
  }

  recent(): Recent {
    const last = this.samples.at(-1);
    const first = this.samples.find((sample) => last !== undefined && sample.at >= last.at - WINDOW_S);
    const over = last !== undefined && first !== undefined ? last.at - first.at : 0;
    if (last === undefined || first === undefined || over <= 0) {
      return { requests_per_s: null, failed: 0, tokens_per_s: null, first_token_s: null, hit_rate: null, over_s: 0 };
    }
    const increase = (name: keyof Totals): number => last.totals[name] - first.totals[name];
    const per = (part: number, whole: number): number | null => (whole > 0 ? part / whole : null);
    return {
      requests_per_s: increase("ended") / over,
      failed: increase("failed"),
      tokens_per_s: increase("completion_tokens") / over,
      first_token_s: per(increase("first_token_s"), increase("first_tokens")),
      hit_rate: per(increase("cached_tokens"), increase("prompt_tokens")),
      over_s: over,
    };
  }

  /** One value for each pair of consecutive samples. */
  private steps(of: (before: Sample, after: Sample) => number): number[] {
    return this.samples.slice(1).map((after, index) => of(this.samples[index] as Sample, after));
  }

  requests(): number[] {
    return this.steps((before, after) => (after.totals.ended - before.totals.ended) / (after.at - before.at));
  }

  queued(): number[] {
    return this.samples.map((sample) => sample.queued);
  }
}

/** A small line without axes; the number next to it has the current value. */
export function sparkline(values: number[]): SVGElement {
  const max = Math.max(1e-9, ...values);
  const step = 100 / Math.max(1, values.length - 1);
  const points = values.map((value, index) => `${(index * step).toFixed(1)},${(23 - (22 * value) / max).toFixed(1)}`);
  const line = svg("polyline", { points: points.join(" ") });
  return svg("svg", { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" }, line);
}
