/* Names and roles that the theme leaves out. */
document.querySelectorAll("[role=dialog]:not([aria-label])").forEach(each => each.setAttribute("aria-label", "Search"));
/* Markdown has no tables without a header. */
document.querySelectorAll("th:empty").forEach(each => each.replaceWith(document.createElement("td")));
/* Only the outer navigation is a landmark, and what scrolls can be scrolled by the keyboard. The theme changes both later. */
function mend() {
  document.querySelectorAll("nav nav, .md-code__nav").forEach(each => {
    each.setAttribute("role", "none");
    ["aria-label", "aria-labelledby", "aria-expanded"].forEach(name => each.removeAttribute(name));
  });
  document.querySelectorAll(":is(pre > code, .md-typeset__scrollwrap):not([tabindex])").forEach(each => {
    if (each.scrollWidth > each.clientWidth) each.tabIndex = 0;
  });
}
new MutationObserver(mend).observe(document.body, {childList: true, subtree: true, attributeFilter: ["tabindex"]});
mend();
