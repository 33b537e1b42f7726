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

/** The element with this id in index.html. */
export function byId<T extends HTMLElement = HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`the page has no #${id}`);
  return found as T;
}

/** Sets the text only if it differs, so that a selection in it survives. */
export function setText(element: Element, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

/** Replaces the children unless the new ones are equal, so that focus and selection survive. */
export function fill(parent: Element, ...children: Child[]): void {
  const fresh = document.createElement(parent.tagName);
  fresh.append(...children.filter((child) => child !== null));
  if (fresh.innerHTML !== parent.innerHTML) parent.replaceChildren(...fresh.childNodes);
}

/** A bar with parts of a whole; hidden from screen readers, because the text next to it has the values. */
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

/** Keyed children: one element per item, in the items' order, reused as long as its key exists. */
export class Keyed<T> {
  private readonly elements = new Map<string, { element: HTMLElement; update: (item: T) => void }>();

  constructor(
    private readonly parent: HTMLElement,
    private readonly key: (item: T) => string,
    private readonly make: (item: T) => { element: HTMLElement; update: (item: T) => void },
  ) {}

  show(items: T[]): void {
    const gone = new Set(this.elements.keys());
    let at = this.parent.firstElementChild;
    for (const item of items) {
      const key = this.key(item);
      gone.delete(key);
      let entry = this.elements.get(key);
      if (entry === undefined) {
        entry = this.make(item);
        this.elements.set(key, entry);
      }
      entry.update(item);
      if (entry.element === at) at = at.nextElementSibling;
      else this.parent.insertBefore(entry.element, at);
    }
    for (const key of gone) {
      this.elements.get(key)?.element.remove();
      this.elements.delete(key);
    }
  }
}
