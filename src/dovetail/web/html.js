// What every module draws with: preact, its hooks, and htm in place of JSX.
import { h, render } from "./vendor/preact.mjs";
import htm from "./vendor/htm.mjs";

export * from "./vendor/hooks.mjs";
export { render };
export const html = htm.bind(h);
