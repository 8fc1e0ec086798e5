"""The style sheet of the HTML pages; colours that can be told apart with any eyes (Okabe and Ito), for light and dark."""

STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--card:#fff;--ink:#1c1e21;--soft:#5c6470;--rule:#dfe2e6;
--c0:#0072b2;--c1:#d98200;--c2:#008f6b;--c3:#a6588a;--c4:#c8460a;--c5:#7a828e;--good:#007a5a;--bad:#b93a00;--warn:#fff4dc}
@media (prefers-color-scheme:dark){:root{--bg:#15171a;--card:#1d2024;--ink:#e8eaed;--soft:#a3abb6;--rule:#33383f;
--c0:#56b4e9;--c1:#f0b040;--c2:#2ec79b;--c3:#d795bd;--c4:#ff8a50;--c5:#98a1ad;--good:#3fd1a5;--bad:#ff8a50;--warn:#3a2f14}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1240px;margin:0 auto;padding:24px 20px 48px}
h1{font-size:24px;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:18px;margin:32px 0 10px;overflow-wrap:anywhere}
p{color:var(--soft);margin:6px 0;max-width:90ch}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(118px,1fr));gap:10px;margin:18px 0}
.tile{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 12px;display:flex;flex-direction:column}
.tile.good{border-left:4px solid var(--good)}
.tile.bad{border-left:4px solid var(--bad)}
.label{color:var(--soft);font-size:13px}
.value{font-size:24px;font-weight:600;font-variant-numeric:tabular-nums}
.unit{font-size:13px;font-weight:400;color:var(--soft)}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,520px),1fr));gap:14px}
figure{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 12px 6px}
figcaption{font-weight:600}
.keys{display:flex;flex-wrap:wrap;gap:4px 14px;font-size:13px;color:var(--soft);min-height:20px}
.key::before{content:"";display:inline-block;width:14px;height:3px;margin-right:6px;vertical-align:middle;background:currentColor}
.key.k0::before{background:var(--c0)}.key.k1::before{background:var(--c1)}.key.k2::before{background:var(--c2)}
.key.k3::before{background:var(--c3)}.key.k4::before{background:var(--c4)}.key.k5::before{background:var(--c5)}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--soft);font-size:14px}
.grid{stroke:var(--rule);stroke-width:1}
.line{fill:none;stroke-width:2;stroke-linejoin:round}
.line.k0{stroke:var(--c0)}.line.k1{stroke:var(--c1)}.line.k2{stroke:var(--c2)}
.line.k3{stroke:var(--c3)}.line.k4{stroke:var(--c4)}.line.k5{stroke:var(--c5);stroke-dasharray:5 3}
.dot.k0{fill:var(--c0)}.dot.k1{fill:var(--c1)}.dot.k2{fill:var(--c2)}.dot.k3{fill:var(--c3)}.dot.k4{fill:var(--c4)}.dot.k5{fill:var(--c5)}
.cell{fill:var(--c0)}
.mark{stroke:var(--soft);stroke-dasharray:3 3}
.tip{fill:transparent}
.tip:hover{fill:var(--soft);fill-opacity:.12}
.table{overflow-x:auto;margin:14px 0}
table{border-collapse:collapse;background:var(--card);border:1px solid var(--rule);font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--soft);font-size:13px;padding-bottom:4px}
th,td{padding:5px 12px;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap}
th{font-weight:600}
th:first-child{text-align:left}
tbody th{font-weight:400}
thead th{color:var(--soft);font-weight:500;font-size:13px}
.columns{display:flex;flex-wrap:wrap;gap:0 24px;align-items:flex-start}
.columns td{text-align:left;white-space:normal;overflow-wrap:anywhere}
.columns thead{display:none}
.warnings{background:var(--warn);border-radius:8px;padding:8px 14px;margin:14px 0}
.warnings ul{margin:0;padding-left:18px}
.beyond{font-weight:600}
@media (max-width:600px){.wide,.wide caption,.wide tbody,.wide tr,.wide th{display:block}.wide thead{display:none}
.wide td{display:flex;justify-content:space-between}.wide td::before{content:attr(data-column);color:var(--soft)}
.wide tbody th{font-weight:600}th,td{white-space:normal;overflow-wrap:anywhere}}
@media print{main{max-width:none}.plots{display:block}figure{break-inside:avoid;margin-bottom:10px}}
"""
