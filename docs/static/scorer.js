// Guides come before decisions, internals and names of the reference.
var Scorer = {
  score: ([docname, , , , score]) => {
    if (/^(howto|tutorials|choosing|others|start|index)/.test(docname)) return score + 10;
    if (/^(decisions|derivations|contributing)/.test(docname)) return score - 10;
    return score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
