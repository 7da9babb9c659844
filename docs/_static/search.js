// Search that finds the page of an error from the whole message, as people paste it. Sphinx's own shows a page only if
// it has every word of the query, and a pasted message has names of the reader's own program in it. Here a page counts
// by the words that it has: rare words count more, words of its title more still. Runs before searchtools.js begins.
(() => {
  const titleWeight = 3; // a word of the title, against one of the text
  const errorPage = 1.5; // a page of one error, against other pages
  const keep = 0.45; // of the best page's weight: what is below it is no answer
  const most = 8; // pages shown

  const has = (table, word) => {
    const pages = Object.hasOwn(table, word) ? table[word] : [];
    return new Set(Array.isArray(pages) ? pages : [pages]);
  };

  const rank = (words, query) => {
    const { docnames, filenames, terms, titles, titleterms } = Search._index;
    const weights = new Array(docnames.length).fill(0);
    for (const word of words) {
      const [text, title] = [has(terms, word), has(titleterms, word)];
      const pages = new Set([...text, ...title]);
      const rare = Math.log(1 + docnames.length / Math.max(pages.size, 1));
      for (const page of pages) weights[page] += rare * (title.has(page) ? titleWeight : 1);
    }
    docnames.forEach((name, page) => {
      if (!name.startsWith("fix/") || name === "fix/index") return;
      const said = splitQuery(titles[page].toLowerCase());
      const there = said.filter((word) => query.includes(word)).length;
      weights[page] *= errorPage + there / said.length; // of two pages, that which is the message, not part of it
    });
    const best = Math.max(...weights);
    return docnames
      .map((name, page) => [name, titles[page], "", null, weights[page], filenames[page], SearchResultKind.text])
      .filter((result) => best > 0 && result[4] >= keep * best)
      .sort((one, other) => other[4] - one[4])
      .slice(0, most);
  };

  document.addEventListener("DOMContentLoaded", () => {
    if (typeof Search === "undefined") return; // only the page of the search has it
    const exact = Search.performTermsSearch;
    Search.performTermsSearch = (words, excluded) => {
      const found = words.size ? rank(words, new URLSearchParams(window.location.search).get("q").toLowerCase()) : [];
      return found.length ? found : exact(words, excluded); // parts of words, as Sphinx finds them
    };
  });
})();
