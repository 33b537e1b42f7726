// The page is built from elements, never from text, so that no name that an engine or a client chose can become markup.

type Child = Node | string | null;

/** An element. Attributes with `null` are left out. */
export function el<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Record<string, string | null> = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag: string, attributes: Record<string, string | number>, ...children: Node[]): SVGElement {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

/** The element with this id, which index.html has. */
export function byId<T extends HTMLElement = HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`the page has no #${id}`);
  return found as T;
}

/** Sets the text if it is another one, so that a selection in it survives. */
export function setText(element: Element, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

/** Replaces the children unless the new ones look the same: focus and selection stay where nothing has changed. */
export function fill(parent: Element, ...children: Child[]): void {
  const fresh = document.createElement(parent.tagName);
  fresh.append(...children.filter((child) => child !== null));
  if (fresh.innerHTML !== parent.innerHTML) parent.replaceChildren(...fresh.childNodes);
}

/** A bar of parts of a whole; its text is beside it, so screen readers pass over it. */
export function bar(whole: number, parts: { kind: string; size: number }[]): HTMLElement {
  const track = el("span", { class: "bar", "aria-hidden": "true" });
  for (const { kind, size } of parts) {
    if (size <= 0 || whole <= 0) continue;
    const part = el("span", { class: `part ${kind}` });
    part.style.inlineSize = `${Math.min(100, (100 * size) / whole)}%`;
    track.append(part);
  }
  return track;
}

/** Keyed children: an element per item, kept while its key stays, in the items' order. */
export class Keyed<T> {
  private readonly kept = new Map<string, { element: HTMLElement; update: (item: T) => void }>();

  constructor(
    private readonly parent: HTMLElement,
    private readonly key: (item: T) => string,
    private readonly make: (item: T) => { element: HTMLElement; update: (item: T) => void },
  ) {}

  show(items: T[]): void {
    const gone = new Set(this.kept.keys());
    let at = this.parent.firstElementChild;
    for (const item of items) {
      const key = this.key(item);
      gone.delete(key);
      let entry = this.kept.get(key);
      if (entry === undefined) {
        entry = this.make(item);
        this.kept.set(key, entry);
      }
      entry.update(item);
      if (entry.element === at) at = at.nextElementSibling;
      else this.parent.insertBefore(entry.element, at);
    }
    for (const key of gone) {
      this.kept.get(key)?.element.remove();
      this.kept.delete(key);
    }
  }
}
