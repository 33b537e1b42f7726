// Rollout progress of each role, from the versions that the gateway knows.

import type { Instance, State } from "./api";
import { bar, byId, el, fill } from "./dom";
import { healthSign } from "./engines";
import { shortName } from "./format";

/** Most listed engines that do not serve. */
const LISTED = 20;

export function showRollout(state: State): void {
  const roles = new Map<string, Instance[]>();
  for (const instance of state.instances) {
    const { group, role } = instance.workload;
    const name = [group, role ?? instance.role].filter((part) => part !== null).join(" / ");
    const others = roles.get(name);
    if (others === undefined) roles.set(name, [instance]);
    else others.push(instance);
  }
  const parts = [...roles].sort(([a], [b]) => a.localeCompare(b)).map(([name, instances]) => roleProgress(name, instances));
  fill(byId("rollout-roles"), ...(parts.length > 0 ? parts : [el("p", { class: "note" }, "No engines.")]));
}

/** What a rollout changes: the image and revision of the pod, or the version that the engine reports. */
function versionOf({ engine, version, workload }: Instance): string {
  const { image, revision } = workload;
  if (image !== null) return revision === null ? image : `${image} (revision ${revision})`;
  return version === null || version === "" ? "version not reported" : `${engine} ${version}`;
}

function roleProgress(role: string, instances: Instance[]): HTMLElement {
  const serving = instances.filter((instance) => instance.state === "serving").length;
  const notServing = instances.filter((instance) => instance.state !== "serving");
  const versions = new Map<string, { all: number; serving: number }>();
  for (const instance of instances) {
    const name = versionOf(instance);
    const counted = versions.get(name) ?? { all: 0, serving: 0 };
    counted.all += 1;
    if (instance.state === "serving") counted.serving += 1;
    versions.set(name, counted);
  }
  const byVersion = [...versions].sort(([a], [b]) => b.localeCompare(a, undefined, { numeric: true }));
  const lines = byVersion.map(([name, { all, serving }]) =>
    el("li", {}, bar(instances.length, [{ kind: "use", size: serving }, { kind: "idle", size: all - serving }]), ` ${name}: ${all} of ${instances.length}${serving < all ? `, ${serving} of them serving` : ""}`),
  );
  const reasons = notServing.slice(0, LISTED).map((instance) => el("li", {}, el("span", { class: "name" }, shortName(instance.id)), " ", healthSign(instance), instance.reason === null ? null : `: ${instance.reason}`));
  const more = notServing.length > LISTED ? el("p", { class: "note" }, `and ${notServing.length - LISTED} more, see Engines`) : null;
  const mixed = versions.size > 1 ? `, ${versions.size} versions in use` : "";
  return el("div", { class: "role" }, el("h3", {}, `${role}: ${serving} of ${instances.length} serving${mixed}`), el("ul", { class: "versions" }, ...lines), notServing.length > 0 ? el("ul", {}, ...reasons) : null, more);
}
