/* Draws what was seen into the picture that was sent: boxes with labels, points, masks as tints. Only canvas. */

// Of classes by their index, as edge_runtime/pictures/drawing.py has them: each is read on white, and white on it.
const COLOURS = [
  [230, 57, 70], [29, 120, 220], [42, 157, 60], [244, 140, 6], [131, 56, 236], [0, 150, 160], [214, 40, 140], [120, 90, 40],
];
const TINT = 0.5;
const LETTER = 15;
const SURE = 0.5;
// Lines between the 17 points of a person, as COCO numbers them.
const LIMBS = [
  [15, 13], [13, 11], [16, 14], [14, 12], [11, 12], [5, 11], [6, 12], [5, 6], [5, 7], [6, 8], [7, 9], [8, 10], [1, 2],
  [0, 1], [0, 2], [1, 3], [2, 4], [3, 5], [4, 6],
];

const colour = (index, alpha = 1) => `rgba(${COLOURS[((index % COLOURS.length) + COLOURS.length) % COLOURS.length].join()},${alpha})`;

export const colourOf = (index) => colour(index);

/** Draw a picture and the first answer about it. picture: anything that a canvas draws, with its own size. */
export function draw(canvas, picture, answer) {
  const { width, height } = picture;
  const shown = canvas.parentElement.clientWidth || width;
  canvas.width = width;
  canvas.height = height;
  const pen = canvas.getContext("2d");
  pen.drawImage(picture, 0, 0, width, height);
  const seen = (answer?.answers ?? [answer ?? {}])[0] ?? {};
  const size = LETTER * Math.max(1, width / shown); // as large on the screen, however large the picture
  if (Array.isArray(seen.mask)) tint(pen, seen.mask, seen.picture, width, height, (index) => (index ? COLOURS[index % COLOURS.length] : null));
  for (const each of [...(seen.masks ?? [])].reverse()) {
    const [high, wide] = each.mask.size;
    const rows = unpack(each.mask.counts, high, wide);
    tint(pen, rows, seen.picture, width, height, (value) => (value ? COLOURS[each.index % COLOURS.length] : null));
  }
  const things = [...(seen.boxes ?? []), ...(seen.masks ?? []), ...(seen.keypoints ?? [])];
  for (const each of [...things].reverse()) outline(pen, each, size);
  for (const each of [...things].reverse()) label(pen, each, size, width);
}

function outline(pen, thing, size) {
  pen.lineWidth = Math.max(2, size / 6);
  pen.strokeStyle = colour(thing.index);
  const [left, top, right, bottom] = thing.box;
  pen.beginPath();
  if (thing.corners) {
    thing.corners.forEach(([x, y], number) => (number ? pen.lineTo(x, y) : pen.moveTo(x, y)));
    pen.closePath();
  } else {
    pen.rect(left, top, right - left, bottom - top);
  }
  pen.stroke();
  const points = thing.points ?? [];
  const isSure = (point) => point !== undefined && (point[2] ?? 1) >= SURE;
  if (points.length === 17) {
    for (const [from, to] of LIMBS) {
      if (!isSure(points[from]) || !isSure(points[to])) continue;
      pen.beginPath();
      pen.moveTo(points[from][0], points[from][1]);
      pen.lineTo(points[to][0], points[to][1]);
      pen.stroke();
    }
  }
  pen.fillStyle = colour(thing.index);
  for (const point of points.filter(isSure)) {
    pen.beginPath();
    pen.arc(point[0], point[1], size / 5, 0, 2 * Math.PI);
    pen.fill();
  }
}

function label(pen, thing, size, width) {
  const text = `${thing.label} ${thing.score.toFixed(2)}`;
  pen.font = `600 ${size}px system-ui, sans-serif`;
  pen.textBaseline = "middle";
  const wide = pen.measureText(text).width + size * 0.6;
  const left = Math.max(0, Math.min(thing.box[0], width - wide));
  const top = Math.max(thing.box[1] - size * 1.35, 0);
  pen.fillStyle = colour(thing.index);
  pen.fillRect(left, top, wide, size * 1.35);
  pen.fillStyle = "#fff";
  pen.fillText(text, left + size * 0.3, top + size * 0.7);
}

/** Lay a mask of the model's own grid over the picture, by the way in which the picture was fitted into that grid. */
function tint(pen, rows, read, width, height, colourAt) {
  const [high, wide] = [rows.length, rows[0]?.length ?? 0];
  if (!wide) return;
  const grid = document.createElement("canvas");
  grid.width = wide;
  grid.height = high;
  const pixels = new ImageData(wide, high);
  rows.forEach((row, y) =>
    row.forEach((value, x) => {
      const found = colourAt(value);
      if (found) pixels.data.set([...found, TINT * 255], (y * wide + x) * 4);
    }),
  );
  grid.getContext("2d").putImageData(pixels, 0, 0);
  const place = placed(read?.fit, width, height, wide, high);
  const across = width / place.width;
  const down = height / place.height;
  pen.imageSmoothingEnabled = false;
  pen.drawImage(grid, -place.left * across, -place.top * down, wide * across, high * down);
}

/** Where a picture lies in the model's: its size there, and its first pixel. As edge_runtime/pictures/fit.py. */
function placed(fit, width, height, wide, high) {
  if (fit !== "crop" && fit !== "letterbox") return { width: wide, height: high, left: 0, top: 0 };
  const scale = (fit === "crop" ? Math.max : Math.min)(wide / width, high / height);
  const [across, down] = [Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale))];
  return { width: across, height: down, left: Math.round((wide - across) / 2 - 0.1), top: Math.round((high - down) / 2 - 0.1) };
}

/** COCO's uncompressed runs, column by column, as rows of 0 and 1. */
function unpack(counts, high, wide) {
  const rows = Array.from({ length: high }, () => new Uint8Array(wide));
  let at = 0;
  counts.forEach((count, number) => {
    if (number % 2) for (let n = at; n < at + count; n += 1) rows[n % high][Math.floor(n / high)] = 1;
    at += count;
  });
  return rows;
}

/** A picture for who has none at hand: shapes on a ground, made here. Resolves to a PNG. */
export function testPicture() {
  const canvas = document.createElement("canvas");
  canvas.width = 640;
  canvas.height = 480;
  const pen = canvas.getContext("2d");
  const sky = pen.createLinearGradient(0, 0, 0, 480);
  sky.addColorStop(0, "#9cc5e8");
  sky.addColorStop(1, "#f4ead2");
  pen.fillStyle = sky;
  pen.fillRect(0, 0, 640, 480);
  pen.fillStyle = "#5a7d4e";
  pen.fillRect(0, 340, 640, 140);
  pen.fillStyle = "#b5483a";
  pen.fillRect(210, 210, 190, 150);
  pen.beginPath();
  pen.moveTo(190, 215);
  pen.lineTo(305, 120);
  pen.lineTo(420, 215);
  pen.fill();
  pen.fillStyle = "#f7c948";
  pen.beginPath();
  pen.arc(530, 95, 44, 0, 2 * Math.PI);
  pen.fill();
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}
