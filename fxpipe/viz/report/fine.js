// Rows whose boxes are a few pixels wide, painted pixel by pixel: one image a frame, however many boxes.
"use strict";

const FINE = 3; // pixels: the mean width of boxes below which a row is fine

class FineImage {
  // The image for a plot; it is cleared.
  begin(width, height) {
    if (this.width !== width || this.height !== height) {
      this.canvas = el("canvas", { width, height });
      this.context = this.canvas.getContext("2d");
      this.image = this.context.createImageData(width, height);
      this.pixels = new Uint32Array(this.image.data.buffer);
      Object.assign(this, {
        width,
        height,
        above: new Uint32Array(width),
        below: new Uint32Array(width),
        high: new Uint16Array(width),
      });
    }
    this.pixels.fill(0);
    this.used = false;
  }

  // The ops first to last of a track, in pixels from `top` on.  x: tick -> pixel; paint: style -> {above, below,
  // high}; dim: whether an op is dimmed.
  row(track, first, last, x, top, pixels, paint, dim) {
    const { above, below, high, width } = this;
    high.fill(0);
    for (let k = first; k <= last; k++) {
      const left = Math.max(0, Math.round(x(track.start[k]))),
        right = Math.min(width, Math.max(left + 1, Math.round(x(track.end[k])))),
        style = paint[track.style[k]],
        fade = dim(k) ? 0x47ffffff : 0xffffffff; // of the four bytes the first is opacity
      for (let i = left; i < right; i++) {
        above[i] = style.above & fade;
        below[i] = style.below & fade;
        high[i] = style.high;
      }
    }
    for (let up = pixels; up > 0; up--) {
      const at = (top + pixels - up) * width;
      for (let i = 0; i < width; i++) if (high[i] >= up) this.pixels[at + i] = 2 * up > high[i] ? above[i] : below[i];
    }
    this.used = true;
  }

  end(context, left, top) {
    if (!this.used) return;
    this.context.putImageData(this.image, 0, 0);
    context.drawImage(this.canvas, left, top);
  }
}

// "#rrggbb" as the four bytes of a pixel.
function pixelOf(text) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16));
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}
