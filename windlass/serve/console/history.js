// Keeps the samples of the charts in the tab while the page is reloaded.

const NAME = "windlass-charts";

// What an earlier page of the same model and version of the console has saved.
export function savedSamples({ model, version }) {
  const saved = JSON.parse(sessionStorage.getItem(NAME) ?? "null");
  return saved?.model === model && saved.version === version ? saved.samples : [];
}

export function saveSamples({ model, version }, samples) {
  try {
    sessionStorage.setItem(NAME, JSON.stringify({ model, version, samples }));
  } catch (error) {
    if (error.name !== "QuotaExceededError") throw error;
    sessionStorage.removeItem(NAME); // the charts begin anew
  }
}

export const forgetSamples = () => sessionStorage.removeItem(NAME);
