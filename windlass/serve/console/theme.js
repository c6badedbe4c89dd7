// Applies the chosen theme before the page is drawn. A classic script: modules run too late for that.
"use strict";
{
  const theme = localStorage.getItem("windlass-theme");
  if (theme) document.documentElement.dataset.theme = theme;
}
