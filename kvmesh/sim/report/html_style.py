"""How the report looks. The colours of lines are those of Okabe and Ito, which most people tell apart."""

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1a1d21;--soft:#5b6470;--line:#d9dee4;--card:#f7f8fa;--mark:#9a6b00;
--k0:#0072b2;--k1:#d55e00;--k2:#009e73;--k3:#cc3377;--k4:#b58900;--k5:#4aa3d8;--k6:#7a5bb5;--k7:#6b6f76}
@media (prefers-color-scheme:dark){:root{--bg:#14171b;--fg:#e6e9ed;--soft:#9aa4b0;--line:#343b44;--card:#1c2026;
--mark:#e0b040;--k0:#56a8e8;--k1:#ff8a45;--k2:#2fc79a;--k3:#f07ab0;--k4:#e6c229;--k5:#8fd0f5;--k6:#b39ae6;--k7:#a6adb6}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1240px;margin:0 auto;padding:16px}
h1{font-size:1.5rem;margin:.2em 0 .6em;overflow-wrap:anywhere}
h3{font-size:1rem;margin:1.2em 0 .4em}
summary{font-weight:600;font-size:1.1rem;cursor:pointer;padding:.6em 0;overflow-wrap:anywhere}
section{border-top:1px solid var(--line);margin-top:1.2em;padding-top:.4em}
.grid-of{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,380px),1fr));gap:14px;margin-top:14px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 10px 8px;min-width:0}
figcaption{font-weight:600;margin:0 4px 6px}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--soft);font-size:12.5px}
svg .label{fill:var(--fg)}
svg .marked{fill:var(--mark)}
.grid{stroke:var(--line);stroke-width:1;fill:none}
.mark{stroke:var(--mark);stroke-width:1.2;stroke-dasharray:5 4}
.line{fill:none;stroke-width:2;stroke-linejoin:round}
.dashed{stroke-dasharray:5 4}
.hover{fill:transparent}
.hover:hover{fill:var(--soft);fill-opacity:.4}
.k0{stroke:var(--k0)}.k1{stroke:var(--k1)}.k2{stroke:var(--k2)}.k3{stroke:var(--k3)}
.k4{stroke:var(--k4)}.k5{stroke:var(--k5)}.k6{stroke:var(--k6)}.k7{stroke:var(--k7)}
.dot{fill:var(--card);stroke-width:2}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;margin:4px;font-size:.85rem;color:var(--soft)}
.legend i{display:inline-block;width:18px;height:0;border-top:3px solid;margin:0 6px 4px 0}
.legend i.dashed{border-top-style:dashed}
i.k0{border-color:var(--k0)}i.k1{border-color:var(--k1)}i.k2{border-color:var(--k2)}i.k3{border-color:var(--k3)}
i.k4{border-color:var(--k4)}i.k5{border-color:var(--k5)}i.k6{border-color:var(--k6)}i.k7{border-color:var(--k7)}
.note,.none{color:var(--soft);font-size:.85rem;margin:.4em 4px}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.88rem}
th,td{padding:4px 8px;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th{color:var(--soft);font-weight:600}
th:first-child,td:first-child{text-align:left;padding-left:2px}
thead:has(th:empty:nth-child(2)){display:none}
.tables{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr));gap:0 28px}
.tables table{width:100%}
.tables td:last-child{white-space:normal;overflow-wrap:anywhere}
dl{font-size:.88rem}dt{font-weight:600}dd{margin:0 0 .5em;color:var(--soft)}
"""
