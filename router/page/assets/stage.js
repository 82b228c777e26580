// SPDX-License-Identifier: Apache-2.0
// Turning and zooming the scene: pointer, two fingers, wheel, keys.

// `scene()` may be null; `changed` is called after each act.
export function steer(canvas, scene, changed) {
  const act = (what) => {
    if (!scene()) return;
    what(scene());
    changed();
  };
  const held = new Map();  // pointers that are down
  const apart = () => {
    const [a, b] = [...held.values()];
    return Math.hypot(a[0] - b[0], a[1] - b[1]);
  };
  canvas.addEventListener('pointerdown', (event) => {
    held.set(event.pointerId, [event.clientX, event.clientY]);
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener('pointermove', (event) => {
    const from = held.get(event.pointerId);
    if (!from) return;
    const here = [event.clientX, event.clientY];
    const before = held.size === 2 ? apart() : 0;
    held.set(event.pointerId, here);
    if (held.size === 1) act((s) => s.turn(-(here[0] - from[0]) * 0.006, (here[1] - from[1]) * 0.005));
    else if (before > 0 && apart() > 0) act((s) => s.zoom(before / apart()));
  });
  for (const end of ['pointerup', 'pointercancel']) canvas.addEventListener(end, (event) => held.delete(event.pointerId));
  // Two fingers are ours; one scrolls the page up and down.
  canvas.addEventListener('touchmove', (event) => { if (event.touches.length > 1) event.preventDefault(); }, {passive: false});
  canvas.addEventListener('wheel', (event) => {
    if (!scene() || !(event.ctrlKey || document.activeElement === canvas)) return;
    event.preventDefault();
    act((s) => s.zoom(Math.exp(event.deltaY * 0.0012)));
  }, {passive: false});
  const keys = {ArrowLeft: (s) => s.turn(-0.12, 0), ArrowRight: (s) => s.turn(0.12, 0), ArrowUp: (s) => s.turn(0, 0.1),
    ArrowDown: (s) => s.turn(0, -0.1), '+': (s) => s.zoom(0.85), '=': (s) => s.zoom(0.85), '-': (s) => s.zoom(1.18)};
  canvas.addEventListener('keydown', (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || !scene()) return;
    event.preventDefault();
    act(keys[event.key]);
  });
}
