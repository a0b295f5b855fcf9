(() => {
  const EVERY_MS = 2000, SLOWEST_MS = 30000;
  const live = document.getElementById("live"), connection = document.getElementById("connection");
  let version = Number(live.dataset.version), failures = 0, seenAt = new Date(), timer;
  const held = new Map();  // parts that somebody is reading with the keyboard or has selected text in
  const isRead = (part) => {
    const selection = getSelection();
    const selected = selection && !selection.isCollapsed && part.contains(selection.anchorNode);
    return selected || part.querySelector(":focus-visible") !== null;
  };
  const put = (name, html) => {
    const part = document.getElementById("p-" + name);
    if (!part) return;
    if (isRead(part)) { held.set(name, html); return; }
    held.delete(name);
    const scrolled = [...part.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
    const open = [...part.querySelectorAll("details")].map((each) => each.open);
    part.innerHTML = html;  // the server escapes whatever the run directory holds
    part.querySelectorAll(".scroll").forEach((each, index) => { each.scrollLeft = scrolled[index] || 0; });
    part.querySelectorAll("details").forEach((each, index) => { each.open = open[index] || false; });
  };
  const look = async () => {
    clearTimeout(timer);
    if (!document.hidden) {
      let said = "";
      try {
        const answer = await fetch("page.json?since=" + version, { signal: AbortSignal.timeout(SLOWEST_MS) });
        if (!answer.ok) throw new Error(answer.statusText);
        const news = await answer.json();
        for (const [name, html] of new Map([...held, ...Object.entries(news.parts)])) put(name, html);
        version = news.version;
        seenAt = new Date();
        failures = 0;
        said = news.problem;
      } catch {
        failures += 1;
        said = "No answer since " + seenAt.toLocaleTimeString() + ": does `stepkeeper status --web` still run?";
      }
      if (connection.textContent !== said) connection.textContent = said;
    }
    clearTimeout(timer);
    timer = setTimeout(look, Math.min(SLOWEST_MS, EVERY_MS * 2 ** failures));
  };
  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
  timer = setTimeout(look, EVERY_MS);
})();
