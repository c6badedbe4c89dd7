// Repeats a request while an element is on the page.

import { ApiError } from "./api.js";

const busy = new WeakSet();

export const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Runs `work` now and every `intervalMs`; a hidden page asks nothing. `onError` gets the reason.
export async function repeatWhileShown(element, intervalMs, work, onError) {
  if (busy.has(element)) return;
  busy.add(element);
  while (element.isConnected) {
    if (!document.hidden) {
      try {
        await work();
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        onError(error.message);
      }
    }
    await pause(intervalMs);
  }
  busy.delete(element);
}
