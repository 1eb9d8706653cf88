// Diagrams keep their natural size and scroll sideways on a narrow screen, where they would shrink until nobody can read them.
const initialize = window.mermaid?.initialize;
if (initialize) {
  window.mermaid.initialize = (options) => {
    const natural = (kind) => ({ ...options[kind], useMaxWidth: false });
    initialize({ ...options, flowchart: natural("flowchart"), sequence: natural("sequence"), state: natural("state") });
  };
}
