// On a narrow screen diagrams keep their natural size and scroll sideways: shrunk to its width nobody could read them.
const initialize = window.mermaid?.initialize;
if (initialize && window.innerWidth < 720) {
  window.mermaid.initialize = (options) => {
    const natural = (kind) => ({ ...options[kind], useMaxWidth: false });
    initialize({ ...options, flowchart: natural("flowchart"), sequence: natural("sequence") });
  };
}
