/* Curves of the last minutes, by uPlot: one small chart a figure, whose cursors move together. */

import uPlot from "./vendor/uplot.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./html.js";
import { NONE, minute, time } from "./words.js";

const HEIGHT = 132;
const SHOWN_S = 900;
const FEW = 60; // values that would be lost as a line, where most samples have none
const SYNC = uPlot.sync("curves");

/** title: of the figure; times: unix seconds; values: numbers or null; words: a value as text. */
export function Curve({ title, times, values, words, colour = "--line-1" }) {
  const place = useRef(null);
  const plot = useRef(null);
  const [at, setAt] = useState(null);
  const theme = useTheme();
  const known = values.filter((each) => each !== null && each !== undefined);
  const isSparse = useRef(false);
  isSparse.current = known.length < Math.min(FEW, values.length);

  useLayoutEffect(() => {
    const style = getComputedStyle(place.current);
    const of = (name) => style.getPropertyValue(name).trim();
    const axis = {
      stroke: of("--muted"),
      grid: { stroke: of("--rule"), width: 1 },
      ticks: { show: false },
      font: `12px ${style.fontFamily}`,
    };
    const shown = new uPlot(
      {
        width: place.current.clientWidth,
        height: HEIGHT,
        legend: { show: false },
        padding: [8, 8, 0, 0],
        cursor: { y: false, sync: { key: SYNC.key }, points: { size: 7 }, drag: { x: false, y: false } },
        scales: {
          x: { range: (_, low, high) => (high === null ? [0, SHOWN_S] : [high - SHOWN_S, high]) },
          y: { range: (_, low, high) => [0, high > 0 ? high * 1.15 : 1] },
        },
        axes: [
          { ...axis, size: 26, space: 70, values: (_, ticks) => ticks.map(minute) },
          { ...axis, size: 52, space: 30, values: (_, ticks) => ticks.map((each) => words(each)) },
        ],
        series: [{}, { stroke: of(colour), fill: `${of(colour)}22`, width: 1.5, points: { show: () => isSparse.current, size: 4 } }],
        hooks: { setCursor: [(self) => setAt(self.cursor.idx ?? null)] },
      },
      [times, values],
      place.current,
    );
    plot.current = shown;
    const resized = new ResizeObserver(() => {
      const width = place.current?.clientWidth;
      if (width && width !== shown.width) shown.setSize({ width, height: HEIGHT });
    });
    resized.observe(place.current);
    return () => {
      resized.disconnect();
      shown.destroy();
      plot.current = null;
    };
  }, [theme]);

  useEffect(() => plot.current?.setData([times, values]), [times, values]);

  const now = known.length ? words(known[known.length - 1]) : NONE;
  const most = known.length ? words(Math.max(...known)) : NONE;
  const pointed = at !== null && at < values.length ? `${words(values[at])} at ${time(times[at])}` : now;
  return html`<figure class="curve">
    <figcaption><span>${title}</span><strong>${pointed}</strong></figcaption>
    <div ref=${place} role="img" aria-label=${`${title}: now ${now}, most ${most} in the last 15 minutes`}></div>
  </figure>`;
}

/** The same numbers as a table, for who cannot see curves: the last of each minute. columns: [title, values, words]. */
export function CurvesTable({ times, columns }) {
  const rows = times
    .map((each, index) => [each, index])
    .filter(([each], index) => index === times.length - 1 || Math.floor(each / 60) !== Math.floor(times[index + 1] / 60))
    .reverse();
  return html`<details class="as-table">
    <summary>As a table</summary>
    <div class="wide" tabindex="0" role="region" aria-label="The curves as a table">
      <table class="plain">
        <thead><tr><th scope="col">Time</th>${columns.map(([title]) => html`<th scope="col" class="number">${title}</th>`)}</tr></thead>
        <tbody>
          ${rows.map(
            ([each, index]) => html`<tr key=${each}>
              <th scope="row">${time(each)}</th>
              ${columns.map(([title, values, words]) => html`<td key=${title} class="number">${words(values[index])}</td>`)}
            </tr>`,
          )}
        </tbody>
      </table>
    </div>
  </details>`;
}

function useTheme() {
  const query = matchMedia("(prefers-color-scheme: dark)");
  const [isDark, setDark] = useState(query.matches);
  useEffect(() => {
    const changed = (event) => setDark(event.matches);
    query.addEventListener("change", changed);
    return () => query.removeEventListener("change", changed);
  }, []);
  return isDark;
}
