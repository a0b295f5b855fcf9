(() => {
  const tip = document.createElement("div");
  tip.id = "tip";
  document.body.append(tip);
  const said = (target) => {
    const title = target.querySelector && target.querySelector(":scope > title");
    if (title) { target.dataset.t = title.textContent; title.remove(); }
    return target.dataset ? target.dataset.t : undefined;
  };
  const show = (event) => {
    const words = said(event.target);
    tip.style.display = words ? "block" : "none";
    if (!words) return;
    tip.textContent = words;
    const box = event.clientX === undefined || event.type === "focusin" ? event.target.getBoundingClientRect() : null;
    const x = box ? box.left : event.clientX, y = box ? box.bottom : event.clientY;
    tip.style.left = Math.max(6, Math.min(x + 14, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = (y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 10 : y + 18) + "px";
  };
  for (const kind of ["pointermove", "pointerdown", "focusin"]) document.addEventListener(kind, show);
  document.addEventListener("focusout", () => { tip.style.display = "none"; });
})();
