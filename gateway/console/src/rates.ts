// From running sums to numbers of the last minute, and lines of the last minutes.

import type { State, Totals } from "./api";
import { svg } from "./dom";

const KEPT_S = 180;
const WINDOW_S = 60;

interface Sample {
  at: number;
  totals: Totals;
  held: number;
}

/** What happened in the window; `null` where nothing did, so that there is nothing to divide by. */
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
    // The sums of a gateway that has restarted begin anew.
    if (last !== undefined && state.totals.ended < last.totals.ended) this.samples = [];
    if (last?.at === state.now) return;
    this.samples.push({ at: state.now, totals: state.totals, held: state.gateway.held });
    while ((this.samples[0]?.at ?? state.now) < state.now - KEPT_S) this.samples.shift();
  }

  recent(): Recent {
    const last = this.samples.at(-1);
    const first = this.samples.find((sample) => last !== undefined && sample.at >= last.at - WINDOW_S);
    const over = last !== undefined && first !== undefined ? last.at - first.at : 0;
    if (last === undefined || first === undefined || over <= 0) {
      return { requests_per_s: null, failed: 0, tokens_per_s: null, first_token_s: null, hit_rate: null, over_s: 0 };
    }
    const grown = (name: keyof Totals): number => last.totals[name] - first.totals[name];
    const per = (part: number, whole: number): number | null => (whole > 0 ? part / whole : null);
    return {
      requests_per_s: grown("ended") / over,
      failed: grown("failed"),
      tokens_per_s: grown("completion_tokens") / over,
      first_token_s: per(grown("first_token_s"), grown("first_tokens")),
      hit_rate: per(grown("cached_tokens"), grown("prompt_tokens")),
      over_s: over,
    };
  }

  /** One value between every two samples: what `of` makes of them. */
  private steps(of: (before: Sample, after: Sample) => number): number[] {
    return this.samples.slice(1).map((after, at) => of(this.samples[at] as Sample, after));
  }

  requests(): number[] {
    return this.steps((before, after) => (after.totals.ended - before.totals.ended) / (after.at - before.at));
  }

  held(): number[] {
    return this.samples.map((sample) => sample.held);
  }
}

/** A small line without axes. What it says is in the number beside it. */
export function sparkline(values: number[]): SVGElement {
  const most = Math.max(1e-9, ...values);
  const step = 100 / Math.max(1, values.length - 1);
  const points = values.map((value, at) => `${(at * step).toFixed(1)},${(23 - (22 * value) / most).toFixed(1)}`);
  const line = svg("polyline", { points: points.join(" ") });
  return svg("svg", { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" }, line);
}
