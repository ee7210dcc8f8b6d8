// What JupyterLab doesn't do for a page of the course, in one plugin without a build step.
(() => {
  // In the dark theme a plot is shown light on dark, with its hues: nothing is stored twice. Where
  // the text beside it speaks of what is black or pale in it, it is shown as it was drawn.
  const STYLE = `
    [data-jp-theme-light="false"] .jp-RenderedImage img { border-radius: 4px; }
    [data-jp-theme-light="false"] .jp-RenderedImage img:not(.as-drawn) {
      filter: invert(0.93) hue-rotate(180deg);
    }
    [data-jp-theme-light="false"] .jp-RenderedImage img.as-drawn { filter: brightness(0.85); }
  `;
  const SHADES = /\b(black|white|dark|pale|bright)/i;  // docs/conf.py has the same rule

  function addStyle() {
    const style = document.createElement("style");
    style.textContent = STYLE;
    document.head.append(style);
  }

  // A picture is described in its cell, `#| fig-alt: ...`; JupyterLab gives an <img> no `alt`.
  function describePictures(panel) {
    const source = cell => cell.model.sharedModel.getSource();
    const describe = () => {
      for (const image of panel.node.querySelectorAll(".jp-RenderedImage img:not([alt])")) {
        const cells = panel.content.widgets;
        const index = cells.findIndex(widget => widget.node.contains(image));
        const found = index >= 0 && source(cells[index]).match(/^#\|\s*fig-alt:\s*(.+)$/m);
        image.alt = found ? found[1].trim() : "";
        const near = [cells[index - 1], cells[index + 1]].filter(c => c && c.model.type === "markdown");
        image.classList.toggle("as-drawn", SHADES.test([image.alt, ...near.map(source)].join(" ")));
      }
    };
    const observer = new MutationObserver(describe);
    observer.observe(panel.node, { childList: true, subtree: true });
    panel.disposed.connect(() => observer.disconnect());
  }

  // When a kernel starts, JupyterLab notes its name and version in the page. The reader has changed
  // nothing by that, so the page isn't marked as unsaved.
  function ignoreKernelNotes(model) {
    model.metadataChanged.connect((_, change) => {
      const wasDirty = model.dirty;
      if (["kernelspec", "language_info"].includes(change.key)) {
        queueMicrotask(() => { model.dirty = wasDirty; });
      }
    });
  }

  // A line of a hundred columns doesn't fit beside the file browser in a narrow window.
  function makeRoom(app) {
    if (window.innerWidth < 1300) {
      app.shell.collapseLeft();
    }
  }

  const plugin = {
    id: "llm-course:pages",
    autoStart: true,
    activate: app => {
      addStyle();
      app.restored.then(() => makeRoom(app));
      app.docRegistry.addWidgetExtension("Notebook", {
        createNew: (panel, context) => {
          describePictures(panel);
          ignoreKernelNotes(context.model);
        }
      });
    }
  };

  window._JUPYTERLAB = window._JUPYTERLAB || {};
  window._JUPYTERLAB["llm-course"] = {
    init: () => {},
    get: async () => () => ({ __esModule: true, default: plugin })
  };
})();
