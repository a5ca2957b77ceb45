// Measures the page as it is drawn. Each function returns what is wrong, in words.
(() => {
  const shows = (element) => element.checkVisibility({ visibilityProperty: true }) && element.getClientRects().length > 0;
  const name = (element) => `${element.tagName.toLowerCase()}${element.id ? `#${element.id}` : ""}.${element.className} "${(element.textContent || "").trim().slice(0, 30)}"`;

  /** Red, green, blue from 0 to 255 and alpha from 0 to 1, of the first colour in a text. */
  function colour(text) {
    const found = /rgba?\(([^)]+)\)/.exec(text);
    if (!found) return null;
    const [r, g, b, a = "1"] = found[1].split(/[\s,/]+/).filter(Boolean);
    return [Number(r), Number(g), Number(b), Number(a)];
  }
  const over = ([r, g, b, a], below) => [r, g, b].map((part, i) => part * a + below[i] * (1 - a));
  function luminance(rgb) {
    const [r, g, b] = rgb.map((part) => {
      const c = part / 255;
      return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }
  function ratio(one, other) {
    const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  }

  /** Colours that may be behind an element: its ground, and the ground with the stripes that are painted on it. */
  function grounds(element) {
    const chain = [];
    for (let at = element; at; at = at.parentElement) chain.unshift(at);
    let all = [[255, 255, 255]];
    const bottom = element.getBoundingClientRect().bottom;
    for (const at of chain) {
      for (const style of [getComputedStyle(at), getComputedStyle(at, "::after")]) {
        // A layer that begins below the text is not behind it.
        if (at.getBoundingClientRect().top + parseFloat(style.top) >= bottom) continue;
        const plain = colour(style.backgroundColor);
        if (plain?.[3]) all = all.map((below) => over(plain, below));
        const stripe = style.backgroundImage.match(/rgba?\([^)]+\)/g)?.map(colour).find((found) => found[3] > 0);
        if (stripe) all = all.flatMap((below) => [below, over(stripe, below)]);
      }
    }
    return all;
  }

  /** Texts with less contrast than WCAG 2.2 AA asks for, and the least ratio. */
  function contrast() {
    const wrong = [];
    let least = 21;
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const element = walker.currentNode.parentElement;
      if (!walker.currentNode.data.trim() || element.closest("script, noscript, option") || !shows(element)) continue;
      const style = getComputedStyle(element);
      const size = parseFloat(style.fontSize);
      const needed = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
      for (const ground of grounds(element)) {
        const found = ratio(over(colour(style.color), ground), ground);
        least = Math.min(least, found);
        if (found < needed) wrong.push(`${found.toFixed(2)}:1 ${name(element)}`);
      }
    }
    return { wrong: [...new Set(wrong)], least: Number(least.toFixed(2)) };
  }

  /** Everything that is wider than the window, and controls that are too small to be met. */
  function fits() {
    const width = document.documentElement.clientWidth;
    const wrong = document.documentElement.scrollWidth > width ? [`the page is ${document.documentElement.scrollWidth} wide`] : [];
    for (const element of document.querySelectorAll("body *")) {
      if (!shows(element) || element.closest("pre, thead")) continue;
      const box = element.getBoundingClientRect();
      if (box.right > width + 1 || box.left < -1) wrong.push(`${Math.round(box.left)} to ${Math.round(box.right)}: ${name(element)}`);
      if (element.matches("button, input, select") && box.height < 24) wrong.push(`${box.height} high: ${name(element)}`);
      // A letter has no dots where it is cut.
      if (element.matches(".initial") && element.scrollWidth > element.clientWidth) wrong.push(`cut: ${name(element)}`);
    }
    for (const bar of document.querySelectorAll(".bar")) wrong.push(...overlaps([...bar.querySelectorAll(".part, .free")]));
    return { wrong, width };
  }

  /** Parts of a bar that are drawn one over the other. */
  function overlaps(parts) {
    const boxes = parts.map((part) => part.getBoundingClientRect()).sort((a, b) => a.left - b.left);
    return boxes.slice(1).filter((box, i) => box.left < boxes[i].right - 1)
      .map((box) => `over another part: ${Math.round(box.left)} to ${Math.round(box.right)} of ${name(parts[0].closest(".bar"))}`);
  }

  /** Faults of the ring of the element with the focus: it can be seen, and is in sight. */
  function focus() {
    const element = document.activeElement;
    const style = getComputedStyle(element);
    const box = element.getBoundingClientRect();
    const ring = colour(style.outlineColor);
    const wrong = [];
    if (element === document.body) return { wrong, what: "body" };
    if (style.outlineStyle === "none" || parseFloat(style.outlineWidth) < 2) wrong.push(`no ring: ${name(element)}`);
    else if (Math.max(...grounds(element.parentElement).map((ground) => ratio(over(ring, ground), ground))) < 3) wrong.push(`a faint ring: ${name(element)}`);
    if (box.bottom <= 0 || box.top >= innerHeight) wrong.push(`out of sight: ${name(element)}`);
    return { wrong, what: name(element) };
  }

  window.measure = { contrast, fits, focus };
})();
