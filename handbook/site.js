/* Names and roles that the theme leaves out. */
document.querySelectorAll("[role=dialog]:not([aria-label])").forEach(each => each.setAttribute("aria-label", "Search"));
/* Markdown has no tables without a header. */
document.querySelectorAll("th:empty").forEach(each => each.replaceWith(document.createElement("td")));
/* Only the outer navigation is a landmark. The theme adds buttons to code later. */
function unmark() {
  document.querySelectorAll("nav nav, .md-code__nav").forEach(each => {
    each.setAttribute("role", "none");
    ["aria-label", "aria-labelledby", "aria-expanded"].forEach(name => each.removeAttribute(name));
  });
}
new MutationObserver(unmark).observe(document.body, {childList: true, subtree: true});
unmark();
/* What scrolls can be scrolled by the keyboard. The theme does so once code is in sight. */
document.querySelectorAll("pre > code").forEach(each => {
  if (each.scrollWidth > each.clientWidth) each.tabIndex = 0;
});
