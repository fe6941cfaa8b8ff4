// Functions and classes come before pages that only name them.
var Scorer = {
  objNameMatch: 60, objPartialMatch: 30, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
