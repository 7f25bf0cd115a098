// What of a run is in view: one stretch of steps for all plots, and how a pointer changes it.

/** The stretch of steps that is shown, and the step the pointer is at. */
class View {
  constructor(range) {
    this.listeners = new Set();
    this.full = range;
    this.range = range;
    this.cursor = null;
  }

  /** A longer run: who looks at the whole goes on looking at the whole. */
  extend(range) {
    const whole = this.isWhole();
    this.full = range;
    this.zoomTo(...(whole ? range : this.range));
  }

  isWhole() {
    return this.range[0] <= this.full[0] && this.range[1] >= this.full[1];
  }

  zoomTo(from, to) {
    const [first, last] = this.full;
    const width = Math.min(Math.max(to - from, 1), Math.max(last - first, 1));
    const start = Math.max(first, Math.min(from, last - width));
    this.range = [start, start + width];
    this.tell();
  }

  zoomBy(factor, at = (this.range[0] + this.range[1]) / 2) {
    const [from, to] = this.range;
    this.zoomTo(at - (at - from) * factor, at + (to - at) * factor);
  }

  panBy(share) {
    const move = share * (this.range[1] - this.range[0]);
    this.zoomTo(this.range[0] + move, this.range[1] + move);
  }

  reset() {
    this.zoomTo(...this.full);
  }

  pointAt(step) {
    this.cursor = step;
    this.tell(true);
  }

  tell(onlyCursor = false) {
    for (const listener of this.listeners) listener(onlyCursor);
  }
}

/** Drag to zoom, shift-drag to pan, ctrl-wheel or pinch to zoom, double click for everything; `onClick(step, y)`. */
function handlePointer(canvas, view, plane, onClick = null, onMove = null) {
  const touches = new Map();
  let drag = null;
  const stepAt = (x) => {
    const { left, width } = plane();
    const [from, to] = view.range;
    return from + ((x - left) / width) * (to - from);
  };
  const clamp = (step) => Math.max(view.range[0], Math.min(view.range[1], step));
  canvas.addEventListener("pointerdown", (event) => {
    touches.set(event.pointerId, event.offsetX);
    canvas.setPointerCapture(event.pointerId);
    drag = {
      x: event.offsetX,
      y: event.offsetY,
      range: view.range,
      pan: event.shiftKey || event.pointerType === "touch",
    };
    if (touches.size === 2) drag = { pinch: [...touches.values()], range: view.range };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (touches.has(event.pointerId)) touches.set(event.pointerId, event.offsetX);
    const [from, to] = drag ? drag.range : view.range;
    const perPixel = (to - from) / plane().width;
    if (drag && drag.pinch && touches.size === 2) {
      const now = [...touches.values()];
      const factor = Math.abs(drag.pinch[0] - drag.pinch[1]) / Math.max(10, Math.abs(now[0] - now[1]));
      const middle = from + ((drag.pinch[0] + drag.pinch[1]) / 2 - plane().left) * perPixel;
      view.zoomTo(middle - (middle - from) * factor, middle + (to - middle) * factor);
    } else if (drag && drag.pan && Math.abs(event.offsetX - drag.x) > 3) {
      const move = (drag.x - event.offsetX) * perPixel;
      drag.moved = true;
      view.zoomTo(from + move, to + move);
    } else {
      showSelection(
        canvas,
        drag && !drag.pan && Math.abs(event.offsetX - drag.x) > 4 ? [drag.x, event.offsetX] : null,
      );
      view.pointAt(clamp(Math.round(stepAt(event.offsetX))));
      if (onMove) onMove(event);
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    touches.delete(event.pointerId);
    showSelection(canvas, null);
    const was = drag;
    drag = null;
    if (!was || was.pinch || was.moved) return;
    if (Math.abs(event.offsetX - was.x) > 4 && !was.pan) {
      const [from, to] = [stepAt(was.x), stepAt(event.offsetX)].sort((a, b) => a - b);
      view.zoomTo(clamp(from), clamp(to));
    } else if (onClick) onClick(clamp(Math.round(stepAt(event.offsetX))), event.offsetY);
  });
  canvas.addEventListener("pointercancel", (event) => {
    touches.delete(event.pointerId);
    drag = null;
  });
  canvas.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse" && !drag) view.pointAt(null);
    if (onMove) onMove(null);
  });
  canvas.addEventListener("dblclick", () => view.reset());
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        view.zoomBy(Math.exp(event.deltaY / 300), stepAt(event.offsetX));
      } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        view.panBy(event.deltaX / plane().width);
      }
    },
    { passive: false },
  );
}

/** The stretch that a drag has marked so far. */
function showSelection(canvas, edges) {
  let shade = canvas.parentElement.querySelector(".selection");
  if (!edges) {
    if (shade) shade.remove();
    return;
  }
  if (!shade) {
    shade = h("div", { class: "selection" });
    canvas.parentElement.append(shade);
  }
  shade.style.left = `${Math.min(...edges)}px`;
  shade.style.width = `${Math.abs(edges[0] - edges[1])}px`;
}
