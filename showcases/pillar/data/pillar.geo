// A channel with a round pillar in it; gmsh -2 -format msh22 pillar.geo makes pillar.msh (gmsh 4.15.2).
SetFactory("OpenCASCADE");
Rectangle(1) = {0, 0, 0, 2, 1};
Disk(2) = {0.7, 0.45, 0, 0.14};
BooleanDifference(3) = { Surface{1}; Delete; }{ Surface{2}; Delete; };
Physical Surface("water") = {3};
MeshSize{ PointsOf{ Surface{3}; } } = 0.075;
Field[1] = Distance;
Field[1].CurvesList = {5};
Field[1].Sampling = 60;
Field[2] = Threshold;
Field[2].InField = 1;
Field[2].SizeMin = 0.035;
Field[2].SizeMax = 0.075;
Field[2].DistMin = 0.02;
Field[2].DistMax = 0.5;
Background Field = 2;
Mesh.MeshSizeExtendFromBoundary = 0;
