// What JupyterLab doesn't do for a page of the course, in one plugin without a build step.
(() => {
  // A picture is described in its cell, `#| fig-alt: ...`; JupyterLab gives an <img> no `alt`.
  function describePictures(panel) {
    const describe = () => {
      for (const image of panel.node.querySelectorAll(".jp-RenderedImage img:not([alt])")) {
        const cell = panel.content.widgets.find(widget => widget.node.contains(image));
        const found = cell && cell.model.sharedModel.getSource().match(/^#\|\s*fig-alt:\s*(.+)$/m);
        image.alt = found ? found[1].trim() : "";
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
