const initialize = window.mermaid?.initialize;
if (initialize) {
  window.mermaid.initialize = (options) => {
    // On a narrow screen diagrams keep their natural size and scroll sideways: shrunk to its width nobody could read them.
    const sized = (kind) => (window.innerWidth < 720 ? { ...options[kind], useMaxWidth: false } : options[kind]);
    // Mermaid draws the arrowheads of sequences in black, which a dark page hides.
    const heads = 'marker[id*="arrowhead"] path { fill: var(--md-mermaid-edge-color); stroke: var(--md-mermaid-edge-color); }';
    const themeCSS = `${options.themeCSS ?? ""} ${heads}`;
    initialize({ ...options, themeCSS, flowchart: sized("flowchart"), sequence: sized("sequence") });
  };
}
